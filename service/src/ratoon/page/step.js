// One step: what is said about it and whom that names, its figures, its groups with their rollouts,
// and its prefix forest.

import { operationAt, orNone, rollouts } from "./api.js";
import { chip, fill, h, panel, short, visible } from "./dom.js";
import { labelOf, policyLink, rolloutLink, stepLink } from "./figures.js";
import { between, clock, duration, NONE, number, percent } from "./format.js";
import { icicle } from "./icicle.js";

const MOST_GROUPS = 60;
const MOST_ROLLOUTS = 200;
const MOST_PASSES = 8;
const HEADLINES = ["reward_mean", "loss", "grad_norm", "sampler_kl", "ratio_max", "entropy", "response_length_mean", "token_reduction"];
// What else a report has is listed below them by these parts of its names, the first that fits.
const FAMILIES = [
  ["Rewards and advantages", /^(reward|advantage|zero_|loss|policy_gradient)/],
  ["Sampler and reference", /^(sampler_|kl|old_kl|step_kl|entropy)/],
  ["Ratio and clip", /^(ratio|clip|correction|clamped)/],
  ["Gradient and weights", /(norm|changed_share|update_)/],
  ["Rollouts", /^(num_|trained|dropped|truncated|response|staleness|token_staleness|prompt)/],
  ["Routing", /^(route|router)/],
  ["Packing and time", /./],
];

export function stepView([id, seq], _, left) {
  const head = h("p", { class: "note" });
  const said = h("div");
  const headlines = h("dl", { class: "facts" });
  const families = h("div", { class: "families" });
  const groups = h("div");
  const forest = panel("Prefix forest");
  forest.hidden = true;
  const opened = new Set();
  let kept = [];
  let drawn = null;
  const picture = icicle({
    onopen(node) {
      const one = kept.find((row) => row.leaf === node);
      if (one) location.hash = rolloutLink(id, seq, one.group, one.rollout);
      return one !== undefined;
    },
  });
  forest.append(
    h("p", { class: "note" }, "Tokens from left to right, rollouts from top to bottom, coloured by reward. A shared prefix is one block. Click to zoom, drag to move; a leaf opens its rollout."),
    picture.element,
  );
  left.addEventListener("abort", () => picture.leave());

  function showGroups(report, why) {
    const byGroup = new Map();
    for (const row of kept) byGroup.set(row.group, [...(byGroup.get(row.group) ?? []), row]);
    const told = report?.groups ?? [];
    const all = told.length ? told.map((_, i) => i) : [...byGroup.keys()].sort((a, b) => a - b);
    const accused = new Map();
    for (const warning of report?.warnings ?? []) {
      for (const one of warning.offenders ?? []) accused.set(`${one.group}/${one.rollout}`, warning.kind);
    }
    const rows = all.map((group) => rowOf(group, byGroup.get(group) ?? [], told[group], accused));
    rows.sort((a, b) => b.accused - a.accused || b.gap - a.gap || a.group - b.group);
    fill(groups, [rows, [...opened], why, passes], () => {
      if (!rows.length) return [
        h("p", { class: "empty" }, why || "This step has kept no rollouts: set keep_rollouts of the policy to worst or all."),
        passes.length ? h("p", null, "They came with ", passes.map((one) => [h("a", { href: stepLink(id, one) }, `forward-backward ${one}`), " "])) : null,
      ];
      return [groupTable(rows.slice(0, MOST_GROUPS), accused), rows.length > MOST_GROUPS ? h("p", { class: "note" }, `${rows.length - MOST_GROUPS} groups more are not shown.`) : null];
    });
  }

  function groupTable(rows, accused) {
    const heads = ["Group", "Rollouts", "Reward", "Spread", "Length", "Worst gap", "Largest ratio", ""];
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Groups" }, h("table", { class: "groups" },
      h("caption", { class: "sr" }, "Groups of the step and their rollouts"),
      h("thead", null, h("tr", null, heads.map((one, i) => h("th", { scope: "col", class: i && i < 7 ? "number" : null }, one || h("span", { class: "sr" }, "Remarks"))))),
      rows.map((row) => groupBody(row, accused))));
  }

  function groupBody(row, accused) {
    const isOpen = opened.has(row.group);
    const toggle = () => {
      if (isOpen) opened.delete(row.group);
      else opened.add(row.group);
      showGroups(report, "");
    };
    return h("tbody", null,
      h("tr", { class: "group" },
        h("th", { scope: "row" }, row.kept.length
          ? h("button", { type: "button", class: "toggle", "aria-expanded": String(isOpen), "data-key": `group-${row.group}`, onclick: toggle }, short(row.name))
          : short(row.name)),
        h("td", { class: "number" }, row.kept.length && row.kept.length < row.count ? `${row.kept.length} of ${row.count} kept` : number(row.count)),
        h("td", { class: "number" }, number(row.reward)),
        h("td", { class: "number" }, row.spread),
        h("td", { class: "number" }, number(row.length, 3)),
        h("td", { class: "number" }, row.gap >= 0 ? number(row.gap) : NONE),
        h("td", { class: "number" }, number(row.ratio)),
        h("td", null, row.accused ? chip(`${row.accused} named`, "warn") : null, row.isFlat ? chip("no variance") : null)),
      isOpen ? row.kept.slice(0, MOST_ROLLOUTS).map((one) => rolloutRow(one, accused.get(`${one.group}/${one.rollout}`))) : null);
  }

  function rolloutRow(one, kind) {
    return h("tr", null,
      h("td", null, h("a", { href: rolloutLink(id, seq, one.group, one.rollout, one.gap_max === null ? null : one.gap_max_token), "data-key": `rollout-${one.group}-${one.rollout}` }, `rollout ${one.rollout}`)),
      h("td", { class: "number note" }, one.policy_version === null ? "" : `version ${one.policy_version}`),
      h("td", { class: "number" }, number(one.reward)),
      h("td", { class: "number" }, one.advantage === null ? "" : `advantage ${number(one.advantage, 3)}`),
      h("td", { class: "number" }, number(one.response_tokens)),
      h("td", { class: "number" }, number(one.gap_max)),
      h("td", { class: "number" }, number(one.ratio_max)),
      h("td", null, kind ? chip(kind, "warn") : null, one.truncated ? chip("truncated") : null, one.dropped ? chip("dropped") : null, one.clip_fraction ? chip(`clipped ${percent(one.clip_fraction)}`) : null));
  }

  // Seqs of the ForwardBackwards right before an OptimStep: its rollouts came with them.
  async function passesOf(operation, signal) {
    const found = [];
    if (operation?.kind !== "optim_step") return found;
    for (let before = Number(seq) - 1; before > 0 && found.length < MOST_PASSES; before -= 1) {
      if ((await operationAt(id, before, signal))?.kind !== "forward_backward") break;
      found.unshift(before);
    }
    return found;
  }

  let report = null;
  let passes = [];
  return {
    title: `Step ${seq} of ${short(id)}`,
    element: h("div", null,
      h("p", { class: "path" }, h("a", { href: "#/" }, "Policies"), " / ", h("a", { href: policyLink(id) }, short(id, 64))),
      h("div", { class: "titled" }, h("h1", null, `Step ${visible(seq)}`),
        h("p", { class: "pages" }, Number(seq) > 1 ? h("a", { href: stepLink(id, Number(seq) - 1) }, `← ${Number(seq) - 1}`) : null, h("a", { href: stepLink(id, Number(seq) + 1) }, `${Number(seq) + 1} →`))),
      head,
      panel("What is said about it", said),
      headlines,
      panel("Groups and rollouts", groups),
      forest,
      panel("All figures", families)),
    async refresh(signal) {
      const [operation, ofRollouts] = await Promise.all([
        operationAt(id, seq, signal),
        orNone(rollouts(id, seq, signal)),
      ]);
      report = operation?.step?.report ?? null;
      passes = await passesOf(operation, signal);
      fill(head, operation, () => (operation ? headOf(operation) : "No operation has this seq."));
      fill(said, [report, operation?.error], () => saidOf(id, seq, operation, report));
      fill(headlines, report, () => HEADLINES.filter((name) => isFigure(report?.[name])).map((name) => h("div", null, h("dt", null, labelOf(name)), h("dd", null, number(report[name])))));
      fill(families, report, () => familiesOf(report));
      kept = ofRollouts.answer?.rollouts ?? [];
      showGroups(report, ofRollouts.why);
      const given = ofRollouts.answer?.forest;
      const signature = given ? `${given.parent.length} ${given.num_tokens.length}` : null;
      forest.hidden = !given?.parent.length;
      if (!forest.hidden && signature !== drawn) picture.set(given);
      drawn = signature;
      // A step that has ended stays as it is.
      return operation?.finished_at ? "over" : "new";
    },
  };
}

const isFigure = (value) => typeof value === "number";

function headOf(operation) {
  const took = between(operation.started_at, operation.finished_at);
  return [
    operation.kind.replaceAll("_", " "), " ", chip(operation.state, operation.state === "failed" ? "bad" : ""),
    operation.step ? ` version ${operation.step.version}` : "",
    ` · begun ${clock(operation.started_at ?? operation.created_at)}`,
    took === null ? "" : ` · took ${duration(took)}`,
  ];
}

function saidOf(id, seq, operation, report) {
  const warnings = report?.warnings ?? [];
  const parts = [];
  if (operation?.error) parts.push(h("p", { class: "warned" }, operation.error.message || operation.error.code));
  if (report?.skipped) parts.push(h("p", { class: "warned" }, `No optimizer step was taken: ${(report.skip_reason ?? "").replaceAll("_", " ")}.`));
  if (!warnings.length && !parts.length) return h("p", { class: "empty" }, report ? "Nothing unusual." : "There is no report.");
  return [parts, warnings.map((warning) => h("article", { class: "warning" },
    h("h3", null, chip(warning.kind, "warn")),
    h("p", null, warning.message),
    warning.offenders?.length
      ? h("ul", { class: "offenders", "aria-label": `Rollouts that ${warning.kind.replaceAll("_", " ")} names, worst first` },
          warning.offenders.map((one) => h("li", null, h("a", { href: rolloutLink(id, seq, one.group, one.rollout, one.token) },
            h("span", { class: "strong" }, `group ${one.group}${one.group_id ? ` (${short(one.group_id, 28)})` : ""}, rollout ${one.rollout}`),
            one.token === null ? "" : `, token ${one.token}`,
            one.value === null ? "" : `: ${number(one.value)}`))))
      : null))];
}

function rowOf(group, kept, told, accused) {
  const rewards = kept.map((one) => one.reward).filter(isFigure);
  const mean = (values) => (values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);
  const least = told?.reward_min ?? (rewards.length ? Math.min(...rewards) : null);
  const most = told?.reward_max ?? (rewards.length ? Math.max(...rewards) : null);
  const largest = (name) => kept.reduce((found, one) => (isFigure(one[name]) && Math.abs(one[name]) > found ? Math.abs(one[name]) : found), -1);
  const ratio = largest("ratio_max");
  return {
    group,
    kept,
    name: told?.group_id || kept[0]?.group_id || `group ${group}`,
    count: told?.num_rollouts ?? kept.length,
    reward: told?.reward_mean ?? mean(rewards),
    spread: least === null ? NONE : least === most ? "none" : `${number(least, 3)} to ${number(most, 3)}`,
    length: told?.response_length_mean ?? mean(kept.map((one) => one.response_tokens)),
    gap: largest("gap_max"),
    ratio: ratio < 0 ? null : ratio,
    accused: kept.filter((one) => accused.has(`${one.group}/${one.rollout}`)).length,
    isFlat: told?.zero_variance ?? false,
  };
}

function familiesOf(report) {
  if (!report) return h("p", { class: "empty" }, "There is no report.");
  const figures = Object.entries(report).flatMap(([name, value]) => {
    if (isFigure(value)) return [[name, value]];
    if (value && typeof value === "object" && !Array.isArray(value)) {
      return Object.entries(value).filter(([, inner]) => isFigure(inner)).map(([inner, one]) => [`${name}.${inner}`, one]);
    }
    return [];
  });
  const found = FAMILIES.map(([title]) => [title, []]);
  for (const figure of figures) found[FAMILIES.findIndex(([, pattern]) => pattern.test(figure[0]))][1].push(figure);
  return found.filter(([, own]) => own.length).map(([title, own]) =>
    h("section", null, h("h3", null, title), h("dl", { class: "figures" }, own.map(([name, value]) => [h("dt", null, name), h("dd", null, number(value, 5))]))));
}
