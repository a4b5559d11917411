// All policies, and the curves of some of them beside each other.

import { policies } from "./api.js";
import { chart, pointer } from "./chart.js";
import { chip, fill, h, panel, short, table } from "./dom.js";
import { COMPARED, labelOf, policyLink, stepLink, told } from "./figures.js";
import { clock, number, NONE } from "./format.js";
import { curve, hasValues, stepSeries } from "./series.js";

const NUM_COLORS = 8;
const NUM_FIRST = 4;
const POINTS = 500;

export function runsView() {
  const list = h("div");
  const none = h("p", { class: "empty", hidden: true }, "Choose policies above to see their curves.");
  const legend = h("ul", { class: "legend" });
  const point = pointer();
  const charts = new Map(
    COMPARED.map((figure) => [figure, chart({ label: labelOf(figure), point, onopen: openNearest(figure) })]),
  );
  const grid = h("div", { class: "charts three" }, [...charts.values()].map((one) => one.element));
  const compared = panel("Beside each other", legend, none, grid);
  compared.hidden = true;
  const chosen = new Map(); // policy id -> {color, series}
  let isFirst = true;
  let found = [];

  // The step of the first chosen policy that has one at `x`.
  function openNearest() {
    return (x) => {
      for (const [id, one] of chosen) {
        if (one.series.all.seq.includes(x)) {
          location.hash = stepLink(id, x);
          return;
        }
      }
    };
  }

  function choose(id, is) {
    if (!is) chosen.delete(id);
    else if (chosen.size < NUM_COLORS) {
      const used = new Set([...chosen.values()].map((one) => one.color));
      const color = [...Array(NUM_COLORS).keys()].map((i) => `c${i}`).find((one) => !used.has(one));
      chosen.set(id, { color, series: stepSeries(id, () => COMPARED, { most: POINTS }) });
    }
  }

  async function draw(signal) {
    const policy = new Map(found.map((one) => [one.spec.policy_id, one]));
    const reads = [...chosen].map(([id, one]) => one.series.read(signal, policy.get(id)));
    await Promise.all(reads);
    for (const [figure, one] of charts) {
      const series = [...chosen].map(([id, { color, series: read }]) => curve(read.all, figure, short(id, 24), color));
      one.element.hidden = ![...chosen.values()].some(({ series: read }) => hasValues(read.all, figure));
      one.set({ series });
    }
    none.hidden = chosen.size > 0;
    fill(legend, [...chosen].map(([id, one]) => [id, one.color]), (rows) =>
      rows.map(([id, color]) => h("li", null, h("i", { class: `key ${color}` }), h("a", { href: policyLink(id) }, short(id, 32)))),
    );
    return show();
  }

  function show() {
    const rows = found.map((one) => {
      const all = chosen.get(one.spec.policy_id)?.series.all;
      return {
        id: one.spec.policy_id,
        base: one.spec.model_folder || one.spec.preset || "",
        tuning: one.spec.lora ? `LoRA ${one.spec.lora.rank}` : "full",
        state: one.state,
        failure: one.failure,
        version: one.version,
        published: one.published_version,
        parameters: one.num_parameters,
        created: one.created_at,
        reward: all ? (all.figures.get("reward_mean")?.mean.at(-1) ?? null) : undefined,
        mark: all?.marks.at(-1) ?? null,
        color: chosen.get(one.spec.policy_id)?.color ?? null,
      };
    });
    return fill(list, rows, () =>
      table(
        "Policies",
        [
          {
            name: "Compare",
            cell: (row) =>
              h("label", { class: "pick" },
                h("input", {
                  type: "checkbox",
                  "data-key": row.id,
                  "aria-label": `Compare ${row.id}`,
                  checked: row.color !== null,
                  disabled: row.color === null && chosen.size >= NUM_COLORS,
                  onchange: (event) => {
                    choose(row.id, event.target.checked);
                    draw(leaving).catch(() => {});
                  },
                }),
                h("i", { class: `key ${row.color ?? ""}` }),
              ),
          },
          { name: "Policy", cell: (row) => h("a", { href: policyLink(row.id), class: "strong" }, short(row.id)) },
          { name: "State", cell: (row) => [chip(row.state, row.state === "failed" ? "bad" : row.state === "ready" ? "good" : ""), row.failure && h("span", { class: "note" }, " ", row.failure)] },
          { name: "Version", number: true, cell: (row) => number(row.version) },
          { name: "Published", number: true, cell: (row) => number(row.published) },
          { name: "Reward", number: true, cell: (row) => (row.reward === undefined ? "" : number(row.reward)) },
          { name: "Last mark", cell: (row) => row.mark ? h("a", { href: stepLink(row.id, row.mark.seq), class: "warned" }, `step ${row.mark.seq}: ${told(row.mark)}`) : "" },
          { name: "Model", cell: (row) => [short(row.base, 32), h("span", { class: "note" }, ` ${row.tuning}`)] },
          { name: "Parameters", number: true, cell: (row) => (row.parameters ? number(row.parameters) : NONE) },
          { name: "Created", cell: (row) => clock(row.created) },
        ],
        rows,
        { empty: "No policy yet. Create one with the Python client, or with: ratoonctl policies create" },
      ),
    );
  }

  let leaving;
  return {
    title: "Policies",
    element: h("div", null, h("h1", null, "Policies"), list, compared),
    async refresh(signal) {
      leaving = signal;
      found = (await policies(signal)).policies.sort((a, b) => (a.created_at < b.created_at ? 1 : -1));
      const ids = new Set(found.map((one) => one.spec.policy_id));
      for (const id of [...chosen.keys()]) if (!ids.has(id)) chosen.delete(id);
      // The newest, those that have been trained first.
      const first = [...found].sort((a, b) => (b.version > 0) - (a.version > 0)).slice(0, NUM_FIRST);
      if (isFirst) for (const one of first) choose(one.spec.policy_id, true);
      isFirst = false;
      compared.hidden = !found.length;
      const isNew = show();
      return (await draw(signal)) || isNew ? "new" : "same";
    },
  };
}
