// One rollout, token by token: its text coloured by the gap to the sampler, the ratio or the
// advantage, the same values as a curve, and the worst tokens first.

import { ApiError, rollout } from "./api.js";
import { chart, pointer } from "./chart.js";
import { chip, fill, h, panel, short, visible } from "./dom.js";
import { policyLink, stepLink } from "./figures.js";
import { NONE, number, percent } from "./format.js";

const PAGE = 4000;
const PROMPT = 200;
const NUM_WORST = 8;
// Bounds of the four shades to either side, in the unit of what is coloured.
const COLORINGS = {
  gap: { name: "Gap to the sampler", unit: "nats", values: (one) => one.gaps, bounds: [0.05, 0.25, 1, 3], of: (value) => value },
  ratio: { name: "Importance ratio", unit: "log", values: (one) => one.ratios, bounds: [0.05, 0.2, 0.5, 1], of: Math.log },
  advantage: { name: "Advantage", unit: "", values: (one) => one.advantages, bounds: [0.1, 0.5, 1, 2], of: (value) => value },
};

export function shade(value, { bounds, of }) {
  if (value === null || value === undefined) return null;
  const measured = of(value);
  if (Number.isNaN(measured)) return null;
  const level = bounds.filter((bound) => Math.abs(measured) >= bound).length;
  return measured < 0 ? -level : level;
}

// Indexes of the tokens that are farthest from no gap, or from a ratio of 1; the farthest first.
export function worst(values, { of }, most = NUM_WORST) {
  const far = (i) => Math.abs(of(values[i]));
  return values
    .map((_, i) => i)
    .filter((i) => values[i] !== null && far(i) > 0)
    .sort((a, b) => far(b) - far(a))
    .slice(0, most);
}

export function rolloutView([id, seq, group, index], query) {
  const point = pointer();
  const facts = h("dl", { class: "facts" });
  const tools = h("div", { class: "ranges", role: "group", "aria-label": "Colour by" });
  const curveOf = h("div");
  const list = h("ol", { class: "worst" });
  const legend = h("p", { class: "scale" });
  const text = h("div", { class: "tokens", role: "group", tabindex: "0", "aria-label": "Tokens of the response; arrow keys move along them" });
  const detail = h("p", { class: "detail", role: "status" });
  const pages = h("p", { class: "pages" });
  const prompt = h("details", { class: "more prompt" });
  const name = h("span");
  let data = null;
  let coloring = "gap";
  let selected = query.get("token") === null ? -1 : Number(query.get("token"));
  let first = 0; // of the tokens that are shown

  function show() {
    const kinds = Object.entries(COLORINGS).filter(([, one]) => one.values(data).some((value) => value !== null));
    if (!kinds.some(([kind]) => kind === coloring) && kinds.length) coloring = kinds[0][0];
    const spec = COLORINGS[coloring];
    const values = spec.values(data);
    tools.replaceChildren(...kinds.map(([kind, one]) =>
      h("button", { type: "button", "aria-pressed": String(kind === coloring), onclick: () => { coloring = kind; show(); } }, one.name)));
    const one = chart({ label: `${spec.name} by token`, unit: "token", tall: true, point, onopen: (i) => select(i, true) });
    one.set({
      series: [{ name: spec.name, color: "c0", x: values.map((_, i) => i), mean: values, low: null, high: null }],
      marks: selected >= 0 ? [{ x: selected, label: "selected" }] : [],
    });
    curveOf.replaceChildren(values.length ? one.element : h("p", { class: "empty" }, "There are no values for single tokens."));
    const ends = worst(values, spec);
    list.replaceChildren(...ends.map((i) => h("li", null,
      h("button", { type: "button", onclick: () => select(i, true) },
        h("span", { class: `token t${shade(values[i], spec)}` }, shownText(i)), ` token ${i} `, h("b", null, number(values[i]))))));
    legend.replaceChildren(
      `${spec.unit === "log" ? "Log of the ratio" : spec.name} `,
      ...[-4, -3, -2, -1, 0, 1, 2, 3, 4].map((level) => {
        const bound = level === 0 ? `within ${spec.bounds[0]}` : `${level < 0 ? "−" : "+"}${spec.bounds[Math.abs(level) - 1]}`;
        return h("span", { class: `token t${level}` }, bound);
      }),
      h("span", { class: "token clipped" }, "clipped"), h("span", { class: "token masked" }, "not trained"));
    showTokens();
    showDetail();
  }

  const tokenOf = (i) => data.tokens[data.prompt_tokens + i];
  function shownText(i) {
    const own = data.texts[data.prompt_tokens + i];
    if (own === undefined) return String(tokenOf(i));
    // Of a character that several tokens share, the last has the text.
    return own === "" ? "·" : visible(own).replaceAll("␊", "⏎");
  }

  function tokenNode(i, spec, values) {
    const level = shade(values[i], spec);
    const kinds = ["token", level === null ? "" : `t${level}`, data.clipped[i] ? "clipped" : "", data.trained[i] === false ? "masked" : "", data.texts.length ? "" : "id", i === selected ? "selected" : ""];
    return h("span", { class: kinds.filter(Boolean).join(" "), "data-i": i }, shownText(i));
  }

  function showTokens() {
    const spec = COLORINGS[coloring];
    const values = spec.values(data);
    const count = data.tokens.length - data.prompt_tokens;
    if (selected >= 0 && (selected < first || selected >= first + PAGE)) first = Math.floor(selected / PAGE) * PAGE;
    const nodes = [];
    for (let i = first; i < Math.min(first + PAGE, count); i += 1) {
      nodes.push(tokenNode(i, spec, values));
      if (data.texts[data.prompt_tokens + i]?.endsWith("\n")) nodes.push(h("br"));
    }
    text.replaceChildren(...nodes);
    pages.hidden = count <= PAGE;
    if (!pages.hidden) {
      const go = (to) => () => { first = to; selected = -1; showTokens(); };
      pages.replaceChildren(
        h("button", { type: "button", disabled: first === 0, onclick: go(first - PAGE) }, "Earlier"),
        h("span", null, `tokens ${first} to ${Math.min(first + PAGE, count) - 1} of ${count}`),
        h("button", { type: "button", disabled: first + PAGE >= count, onclick: go(first + PAGE) }, "Later"));
    }
  }

  function select(i, scrolls) {
    const isOnPage = i >= first && i < first + PAGE;
    text.querySelector(".selected")?.classList.remove("selected");
    selected = i;
    if (!isOnPage) showTokens();
    const node = text.querySelector(`[data-i="${i}"]`);
    node?.classList.add("selected");
    if (scrolls) node?.scrollIntoView({ block: "nearest" });
    point.set(i);
    showDetail();
  }

  function showDetail() {
    const count = data.tokens.length - data.prompt_tokens;
    if (selected < 0 || selected >= count) {
      detail.textContent = "Choose a token to see its numbers.";
      return;
    }
    const i = selected;
    const at = (values) => number(values[i]);
    detail.replaceChildren(
      h("b", null, `token ${i}`), ` “${shownText(i)}” id ${tokenOf(i)} · gap ${at(data.gaps)} · ratio ${at(data.ratios)} · advantage ${at(data.advantages)}`,
      data.clipped[i] ? " · clipped" : "", data.trained[i] === false ? " · not trained" : "");
  }

  text.addEventListener("click", (event) => {
    const at = event.target.dataset?.i;
    if (at !== undefined) select(Number(at), false);
  });
  text.addEventListener("keydown", (event) => {
    if (!data) return;
    const last = data.tokens.length - data.prompt_tokens - 1;
    const to = { ArrowRight: selected + 1, ArrowLeft: selected - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(Math.min(Math.max(to, 0), last), true);
  });

  return {
    title: `Rollout ${index} of group ${group}, step ${seq}`,
    element: h("div", null,
      h("p", { class: "path" }, h("a", { href: "#/" }, "Policies"), " / ", h("a", { href: policyLink(id) }, short(id, 64)), " / ", h("a", { href: stepLink(id, seq) }, `Step ${visible(seq)}`)),
      h("h1", null, `Rollout ${visible(index)} of group ${visible(group)} `, name),
      facts,
      h("div", { class: "sides" },
        h("div", null, tools, curveOf),
        panel("Worst tokens", list)),
      panel("Response", legend, detail, text, pages),
      prompt),
    async refresh(signal) {
      try {
        data = await rollout(id, seq, group, index, signal);
      } catch (error) {
        if (error instanceof ApiError && error.status === 404) {
          throw new ApiError(404, { message: `${error.message.replace(/\.$/, "")}. Its row of the step may still be there; what is kept of rollouts is set by the policy's keep_rollouts` });
        }
        throw error;
      }
      name.replaceChildren(data.group_id ? h("span", { class: "note" }, short(data.group_id, 40)) : "", data.truncated ? chip("truncated") : "", data.dropped ? chip("dropped") : "");
      const fact = (label, value) => (value === NONE ? null : h("div", null, h("dt", null, label), h("dd", null, value)));
      fill(facts, data.reward, () => [
        fact("Reward", number(data.reward)), fact("Advantage", number(data.advantage)),
        fact("Mean |gap|", number(data.gap_abs_mean)), fact("Largest gap", number(data.gap_max)),
        fact("Largest ratio", number(data.ratio_max)), fact("Clipped", percent(data.clip_fraction)),
        fact("Prompt", `${number(data.prompt_tokens)} tokens`), fact("Response", `${number(data.response_tokens)} tokens`),
        fact("Share of the gradient", percent(data.weight_share)), fact("Sampled at version", number(data.policy_version)),
      ]);
      const shownPrompt = data.tokens.slice(0, data.prompt_tokens).map((token, i) => data.texts[i] ?? `${token} `);
      prompt.replaceChildren(
        h("summary", null, `Prompt, ${number(data.prompt_tokens)} tokens`),
        h("p", { class: "tokens plain" }, data.prompt_tokens > PROMPT * 10 ? `… ${visible(shownPrompt.slice(-PROMPT * 10).join("")).replaceAll("␊", "\n")}` : visible(shownPrompt.join("")).replaceAll("␊", "\n")));
      show();
      if (selected >= 0) {
        point.set(selected);
        const node = text.querySelector(".selected");
        // Only the tokens are scrolled: the page stays at its heading.
        if (node) text.scrollTop = node.offsetTop - text.offsetTop - text.clientHeight / 2;
      }
      return "over";
    },
  };
}
