// The page's frame: which view the address names, and when it is read anew. One view lives at a
// time; leaving it aborts what it has asked for and drops all that it held.

import { ApiError, get, hasKey, setKey } from "./api.js";
import { fill, h } from "./dom.js";
import { operationsView } from "./operations.js";
import { policyView } from "./policy.js";
import { rolloutView } from "./rollout.js";
import { runsView } from "./runs.js";
import { stepView } from "./step.js";

const PERIOD_MS = 5000;
const QUIET_MS = 20_000;
const MOST_MS = 60_000;
// "*" takes any part of the address.
const ROUTES = [
  [[], runsView],
  [["operations"], operationsView],
  [["policies", "*"], policyView],
  [["policies", "*", "steps", "*"], stepView],
  [["policies", "*", "steps", "*", "rollouts", "*", "*"], rolloutView],
];

const main = document.getElementById("main");
const live = document.getElementById("live");
const forget = document.getElementById("key");
let current = null;

function parsed(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  try {
    return [path.split("/").filter(Boolean).map(decodeURIComponent), new URLSearchParams(query)];
  } catch {
    return [["?"], new URLSearchParams()];
  }
}

function found(parts) {
  for (const [pattern, view] of ROUTES) {
    if (pattern.length === parts.length && pattern.every((one, i) => one === "*" || one === parts[i])) {
      return [view, parts.filter((_, i) => pattern[i] === "*")];
    }
  }
  return [nowhere, []];
}

function nowhere() {
  return {
    title: "Nothing here",
    element: h("p", { class: "empty" }, "There is no such view. ", h("a", { href: "#/" }, "All policies")),
    refresh: async () => "over",
  };
}

function open() {
  current?.leave.abort();
  clearTimeout(current?.timer);
  const [parts, query] = parsed(location.hash);
  const [make, values] = found(parts);
  const leave = new AbortController();
  const view = make(values, query, leave.signal);
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const isFirst = current === null;
  current = { view, leave, error, timer: 0, failures: 0, newest: 0 };
  document.title = `${view.title} · Ratoon`;
  main.replaceChildren(error, view.element);
  main.setAttribute("aria-busy", "true");
  for (const link of document.querySelectorAll("header nav a")) {
    const isHere = link.hash === `#/${parts[0] === "operations" ? "operations" : ""}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!isFirst) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  refresh();
}

// Reads the view anew, which says what came of it: "new", "same" or "over", after which it is read no
// more. Otherwise it is read again after a quarter of the time since anything was new, within bounds,
// and never while the page is hidden.
async function refresh() {
  const mine = current;
  clearTimeout(mine.timer);
  let goesOn = true;
  try {
    const came = await mine.view.refresh(mine.leave.signal);
    if (mine !== current) return;
    goesOn = came !== "over";
    if (came === "new") mine.newest = performance.now();
    mine.failures = 0;
    mine.error.hidden = true;
    told(goesOn ? "live" : "");
  } catch (error) {
    if (mine !== current || mine.leave.signal.aborted) return;
    if (error instanceof ApiError && error.status === 401) {
      ask(hasKey() ? error.message : "");
      return;
    }
    mine.failures += 1;
    goesOn = !(error instanceof ApiError) || error.status >= 429;
    mine.error.hidden = false;
    fill(mine.error, [shown(error), goesOn], ([text]) => (goesOn ? `${text} Trying again.` : text));
    told(goesOn ? "waiting" : "");
    if (!(error instanceof ApiError)) console.error(error);
  }
  main.setAttribute("aria-busy", "false");
  forget.hidden = !hasKey();
  if (goesOn && !document.hidden) {
    const quiet = Math.min((performance.now() - mine.newest) / 4, QUIET_MS);
    mine.timer = setTimeout(refresh, Math.min(Math.max(PERIOD_MS, quiet) * 2 ** mine.failures, MOST_MS));
  }
}

function shown(error) {
  if (error instanceof ApiError) return `${error.message.replace(/\.$/, "")}.`;
  return error.name === "TimeoutError" ? "The service took too long." : "The service does not answer.";
}

function told(state) {
  if (live.dataset.state === state) return;
  live.dataset.state = state;
  live.textContent = { live: "Live", waiting: "No answer", paused: "Paused" }[state] ?? "";
}

function ask(why) {
  const dialog = document.getElementById("ask");
  const input = document.getElementById("ask-key");
  document.getElementById("ask-why").textContent = why;
  input.value = "";
  if (!dialog.open) dialog.showModal();
  dialog.onclose = () => {
    const text = input.value.trim();
    input.value = "";
    if (text) setKey(text);
    begin();
  };
}

forget.addEventListener("click", () => {
  setKey(null);
  forget.hidden = true;
  open();
});
addEventListener("hashchange", open);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(current.timer);
    told("paused");
  } else refresh();
});

async function begin() {
  open();
  try {
    const info = await get(["info"]);
    fill(document.getElementById("server"), [info.version, info.device], ([version, device]) => `${version} · ${device}`);
  } catch {
    // The view says what is wrong.
  }
}

begin();
