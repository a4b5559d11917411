// One policy: curves over its steps with marks, warnings, weights and receivers, checkpoints.

import { checkpoints, operations, orNone, policy, steps, versions } from "./api.js";
import { chart, pointer } from "./chart.js";
import { chip, fill, h, panel, short, table } from "./dom.js";
import { GROUPS, labelOf, stepLink, told } from "./figures.js";
import { bytes, clock, number, percent } from "./format.js";
import { operationsTable } from "./operations.js";
import { curve, hasValues, stepSeries } from "./series.js";

const FIRST = "reward_mean";
const SHOWN = [FIRST, ...GROUPS.flatMap(([, figures]) => figures)];
const NUM_WARNINGS = 12;
// How often the lists below the curves are read.
const LISTS_MS = 30_000;
const RANGES = [["All steps", null], ["Last 1000", 1000], ["Last 200", 200]];

export function policyView([id]) {
  const point = pointer();
  const open = (seq) => {
    location.hash = stepLink(id, seq);
  };
  const facts = h("dl", { class: "facts" });
  const state = h("span");
  const hero = chart({ label: labelOf(FIRST), tall: true, point, onopen: open, marker: markLink });
  const charts = new Map([[FIRST, hero]]);
  const groups = GROUPS.map(([title, figures]) => {
    const own = figures.map((figure) => {
      const one = chart({ label: labelOf(figure), point, onopen: open });
      charts.set(figure, one);
      one.element.hidden = true;
      return one.element;
    });
    return panel(title, h("div", { class: "charts four" }, own));
  });
  const more = h("details", { class: "more" }, h("summary", null, "More figures"), h("div", { class: "charts four" }));
  const warnings = h("div");
  const weights = h("div");
  const receivers = h("div");
  const saved = h("div");
  const recent = h("div");
  const empty = h("p", { class: "empty", hidden: true }, "No step yet: curves begin with the first update.");
  const ranges = h("div", { class: "ranges", role: "group", "aria-label": "Steps shown" }, RANGES.map(([name, last], i) =>
    h("button", { type: "button", "aria-pressed": String(i === 0), onclick: (event) => choose(event.target, last) }, name)));

  let available = null;
  let series = stepSeries(id, wanted);
  let rest = [];
  let leaving;
  let isDrawn = false;

  function wanted() {
    return available.filter((name) => SHOWN.includes(name) || (more.open && rest.includes(name)));
  }

  function choose(button, last) {
    for (const one of ranges.children) one.setAttribute("aria-pressed", String(one === button));
    series = stepSeries(id, wanted, { last });
    isDrawn = false;
    read(leaving).catch(() => {});
  }

  more.addEventListener("toggle", () => {
    if (!more.open) return;
    for (const figure of rest) {
      if (charts.has(figure)) continue;
      const one = chart({ label: labelOf(figure), point, onopen: open });
      charts.set(figure, one);
      more.lastElementChild.append(one.element);
    }
    series.reset();
    read(leaving).catch(() => {});
  });

  let now = null; // the policy
  let listedAt = -LISTS_MS;
  async function read(signal) {
    if (!available) {
      const answer = await steps(id, { max_points: 1 }, signal);
      const names = answer.series.filter((one) => one.mean.some((value) => value !== null)).map((one) => one.figure);
      empty.hidden = answer.num_steps > 0;
      hero.element.hidden = ranges.hidden = answer.num_steps === 0;
      if (!answer.num_steps) return false;
      available = names;
      rest = names.filter((name) => !SHOWN.includes(name));
      more.hidden = !rest.length;
    }
    const mine = series;
    const hasSteps = await mine.read(signal, now);
    if (mine === series && (hasSteps || !isDrawn)) {
      draw();
      isDrawn = true;
    }
    return hasSteps;
  }

  async function readLists(signal) {
    const [ofWeights, ofCheckpoints, ofOperations] = await Promise.all([
      orNone(versions(id, signal)),
      orNone(checkpoints(id, signal)),
      orNone(operations({ policy_id: id, page_size: 8 }, signal)),
    ]);
    fill(weights, ofWeights, versionTable);
    fill(receivers, [ofWeights, now.published_version], receiverTable);
    fill(saved, ofCheckpoints, checkpointTable);
    fill(recent, ofOperations, ({ answer, why }) => (answer ? operationsTable(answer.operations, { isOfOne: true }) : refused(why)));
    listedAt = performance.now();
  }

  function draw() {
    const { all } = series;
    const marks = all.marks.map((mark) => ({ x: mark.seq, label: told(mark), mark }));
    for (const [figure, one] of charts) {
      one.element.hidden = figure !== FIRST && !hasValues(all, figure);
      if (!one.element.hidden) one.set({ series: [banded(all, figure)], marks });
    }
    for (const group of groups) group.hidden = [...group.querySelectorAll("figure")].every((one) => one.hidden);
    const rows = all.marks.toReversed();
    fill(warnings, rows.slice(0, NUM_WARNINGS).concat(rows.length), () => warningList(rows));
  }

  function markLink({ mark }, few) {
    const label =
      few.length > 1
        ? `${few.length} marked steps, ${few[0].x} to ${mark.seq}; step ${mark.seq}: ${told(mark)}`
        : `Step ${mark.seq}: ${told(mark)}`;
    const isWarning = mark.warnings.length || mark.skip_reason;
    return h("a", { href: stepLink(id, mark.seq), class: isWarning ? "mark" : "mark plain", "aria-label": label, title: label });
  }

  function warningList(rows) {
    if (!rows.length) return h("p", { class: "empty" }, "No warning so far.");
    const item = (mark) =>
      h("li", null, h("a", { href: stepLink(id, mark.seq), "data-key": mark.seq },
        h("span", { class: "when" }, `step ${mark.seq}`), " ",
        mark.skip_reason ? [chip(`skipped: ${mark.skip_reason}`, "bad"), " "] : null,
        mark.warnings.map((kind) => [chip(kind, "warn"), " "]),
        mark.warnings.length || mark.skip_reason ? null : chip(mark.kind)));
    const [first, others] = [rows.slice(0, NUM_WARNINGS), rows.slice(NUM_WARNINGS, 500)];
    return [
      h("ol", { class: "warnings" }, first.map(item)),
      others.length
        ? h("details", { class: "more" }, h("summary", null, `${others.length} older`), h("ol", { class: "warnings" }, others.map(item)))
        : null,
    ];
  }

  return {
    title: short(id),
    element: h("div", null,
      h("p", { class: "path" }, h("a", { href: "#/" }, "Policies")),
      h("h1", null, short(id, 64), " ", state),
      facts, empty,
      h("div", { class: "sides" },
        h("div", null, ranges, hero.element),
        panel("Warnings", warnings)),
      groups, more,
      h("div", { class: "pair" },
        panel("Receivers", receivers), panel("Versions", weights), panel("Checkpoints", saved),
        panel("Latest operations", recent, h("p", null, h("a", { href: `#/operations?policy=${encodeURIComponent(id)}` }, "All operations of this policy"))))),
    async refresh(signal) {
      leaving = signal;
      now = await policy(id, signal);
      fill(state, now.state, (name) => chip(name, name === "failed" ? "bad" : name === "ready" ? "good" : ""));
      const isNew = fill(facts, now, factsOf);
      const isDue = performance.now() - listedAt >= LISTS_MS;
      const [hasSteps] = await Promise.all([read(signal), isDue && readLists(signal)]);
      return isNew || hasSteps ? "new" : "same";
    },
  };
}

// A curve's own band, or for rewards of single steps, one standard deviation of the batch.
function banded(all, figure) {
  const one = curve(all, figure, labelOf(figure), "c0");
  const spread = all.figures.get("reward_std")?.mean;
  if (figure !== FIRST || one.low || !spread) return one;
  const shifted = (sign) => one.mean.map((mean, i) => (mean === null || spread[i] === null ? null : mean + sign * spread[i]));
  return { ...one, low: shifted(-1), high: shifted(1) };
}

function refused(why) {
  return h("p", { class: "empty" }, why);
}

function fact(name, value) {
  return h("div", null, h("dt", null, name), h("dd", null, value));
}

function factsOf(now) {
  const { spec } = now;
  return [
    now.failure && fact("Failure", now.failure),
    fact("Version", number(now.version)),
    fact("Published", number(now.published_version)),
    fact("Next seq", number(now.next_seq)),
    fact("Model", spec.model_folder || spec.preset || ""),
    fact("Tuning", spec.lora ? `LoRA, rank ${spec.lora.rank}` : "full"),
    fact("Dtype", spec.dtype),
    fact("Parameters", now.num_trainable_parameters === now.num_parameters ? number(now.num_parameters) : `${number(now.num_trainable_parameters)} of ${number(now.num_parameters)}`),
    fact("Workers", number(spec.parallel?.num_workers)),
    fact("Attention", now.attention_backend),
    fact("Created", clock(now.created_at)),
  ];
}

function versionTable({ answer, why }) {
  if (!answer) return refused(why);
  return table("Published versions", [
    { name: "Version", number: true, cell: (row) => [number(row.version), row.is_held ? [" ", chip("held")] : null] },
    { name: "Size", number: true, cell: (row) => bytes(row.size_bytes) },
    { name: "Delta", number: true, cell: (row) => row.delta_bytes ? `${bytes(row.delta_bytes)}, ${percent(row.delta_bytes / row.size_bytes)}` : "–" },
    { name: "Published", cell: (row) => clock(row.published_at) },
    { name: "Names", cell: (row) => short(row.names.map((each) => each.name).join(", "), 36) },
  ], answer.versions.toSorted((a, b) => b.version - a.version), { empty: "No version is published." });
}

function receiverTable([{ answer, why }]) {
  if (!answer) return refused(why);
  return table("Receivers of weights", [
    { name: "Receiver", cell: (row) => short(row.receiver_id, 32) },
    { name: "Version", number: true, cell: (row) => number(row.version) },
    { name: "Lag", number: true, cell: (row) => row.lag ? h("span", { class: "warned" }, number(row.lag)) : number(row.lag) },
    { name: "Holds", number: true, cell: (row) => number(row.holds_version) },
    { name: "Last seen", cell: (row) => clock(row.last_seen) },
  ], answer.receivers, { empty: "No receiver has acknowledged a version." });
}

function checkpointTable({ answer, why }) {
  if (!answer) return refused(why);
  return table("Checkpoints", [
    { name: "Checkpoint", cell: (row) => short(row.checkpoint_id, 36) },
    { name: "Version", number: true, cell: (row) => number(row.version) },
    { name: "Seq", number: true, cell: (row) => number(row.seq) },
    { name: "Size", number: true, cell: (row) => bytes(row.size_bytes) },
    { name: "Saved", cell: (row) => clock(row.created_at) },
  ], answer.checkpoints.toReversed().slice(0, 50), { empty: "No checkpoint." });
}
