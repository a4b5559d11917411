// Operations, newest first, with filters and pages.

import { operations } from "./api.js";
import { chip, fill, h, short, table } from "./dom.js";
import { policyLink, stepLink } from "./figures.js";
import { between, clock, duration, number } from "./format.js";

const KINDS = [
  "create_policy", "delete_policy", "update", "forward_backward", "optim_step", "discard_gradients",
  "forward", "save_checkpoint", "load_checkpoint", "publish_version", "import_weights",
];
const STATES = ["queued", "running", "done", "failed", "cancelled"];
const STEPS = new Set(["update", "optim_step", "forward_backward"]);
const PAGE = 50;

export function operationsView(_, query) {
  const filters = { policy_id: query.get("policy") ?? "", kinds: query.get("kind") ?? "", states: query.get("state") ?? "" };
  const list = h("div");
  const pages = [""]; // tokens of the pages up to the one that is shown
  let next = "";
  let leaving;

  function changed() {
    const told = new URLSearchParams();
    if (filters.policy_id) told.set("policy", filters.policy_id);
    if (filters.kinds) told.set("kind", filters.kinds);
    if (filters.states) told.set("state", filters.states);
    history.replaceState(null, "", `#/operations${told.size ? `?${told}` : ""}`);
    pages.splice(1);
    read(leaving).catch(() => {});
  }

  const select = (label, name, values) =>
    h("label", null, `${label} `, h("select", { onchange: (event) => { filters[name] = event.target.value; changed(); } },
      h("option", { value: "" }, "any"),
      values.map((one) => h("option", { value: one, selected: one === filters[name] }, one.replaceAll("_", " ")))));
  const newer = h("button", { type: "button", disabled: true, onclick: () => { pages.pop(); read(leaving).catch(() => {}); } }, "Newer");
  const older = h("button", { type: "button", disabled: true, onclick: () => { pages.push(next); read(leaving).catch(() => {}); } }, "Older");

  async function read(signal) {
    const answer = await operations({ ...filters, page_size: PAGE, page_token: pages.at(-1) }, signal);
    next = answer.next_page_token;
    older.disabled = !next;
    newer.disabled = pages.length < 2;
    return fill(list, answer.operations, (rows) => operationsTable(rows, {}));
  }

  return {
    title: "Operations",
    element: h("div", null,
      h("h1", null, "Operations"),
      h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
        h("label", null, "Policy ", h("input", { type: "search", value: filters.policy_id, placeholder: "any", onchange: (event) => { filters.policy_id = event.target.value.trim(); changed(); } })),
        select("Kind", "kinds", KINDS),
        select("State", "states", STATES)),
      list,
      h("p", { class: "pages" }, newer, older)),
    async refresh(signal) {
      leaving = signal;
      return (await read(signal)) ? "new" : "same";
    },
  };
}

export function operationsTable(rows, { isOfOne = false }) {
  const columns = [
    { name: "Seq", number: true, cell: (row) => !row.seq ? "" : STEPS.has(row.kind) ? h("a", { href: stepLink(row.policy_id, row.seq), "data-key": row.operation_id }, number(row.seq)) : number(row.seq) },
    { name: "Policy", cell: (row) => h("a", { href: policyLink(row.policy_id) }, short(row.policy_id, 32)) },
    { name: "Kind", cell: (row) => row.kind.replaceAll("_", " ") },
    { name: "State", cell: (row) => chip(row.state, row.state === "failed" ? "bad" : row.state === "running" ? "good" : "") },
    { name: "Took", number: true, cell: (row) => duration(between(row.started_at, row.finished_at)) },
    { name: "Begun", cell: (row) => clock(row.started_at ?? row.created_at) },
    { name: "Result", cell: resultOf, wide: true },
  ];
  return table("Operations, newest first", isOfOne ? columns.filter((one) => one.name !== "Policy") : columns, rows, { empty: "No such operation." });
}

function resultOf(row) {
  if (row.error) return h("span", { class: "warned" }, row.error.message || row.error.code);
  if (row.blocked_by_seq) return `waits for seq ${row.blocked_by_seq}`;
  if (row.state === "running" && row.progress?.micro_batches_planned) {
    return `${row.progress.micro_batches_done} of ${row.progress.micro_batches_planned} micro-batches`;
  }
  const report = row.step?.report ?? row.forward?.report;
  if (report) {
    const parts = [
      row.step && `version ${row.step.version}`,
      report.skipped && "skipped",
      report.reward_mean !== null && `reward ${number(report.reward_mean)}`,
      report.loss !== null && `loss ${number(report.loss)}`,
      report.grad_norm !== null && `norm ${number(report.grad_norm)}`,
    ];
    return [
      parts.filter(Boolean).join(" · "),
      [...new Set(report.warnings.map((warning) => warning.kind))].map((kind) => [" ", chip(kind, "warn")]),
    ];
  }
  if (row.checkpoint) return `${short(row.checkpoint.checkpoint_id)}, version ${row.checkpoint.version}`;
  if (row.imported) return `version ${row.imported.version}, ${row.imported.num_tensors} tensors`;
  return "";
}
