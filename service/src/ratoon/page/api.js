// The service's HTTP API. The key is kept in sessionStorage: for this tab, until it is closed.

const KEY = "ratoon-key";
const TIMEOUT_MS = 30_000;

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail.message || `the service answered ${status}`);
    this.status = status;
    this.code = detail.code || "";
  }
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function setKey(text) {
  if (text === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, text);
}

// `parts` of the path are escaped; `query` leaves out what is empty, and repeats lists.
export async function get(parts, query = {}, signal = undefined) {
  const url = new URL(`v1/${parts.map(encodeURIComponent).join("/")}`, document.baseURI);
  url.hash = "";
  for (const [name, value] of Object.entries(query)) {
    for (const one of [value].flat()) {
      if (one !== null && one !== undefined && one !== "") url.searchParams.append(name, one);
    }
  }
  const key = sessionStorage.getItem(KEY);
  const timeout = AbortSignal.timeout(TIMEOUT_MS);
  const response = await fetch(url, {
    headers: key === null ? {} : { Authorization: `Bearer ${key}` },
    credentials: "omit",
    cache: "no-store",
    signal: signal ? AbortSignal.any([signal, timeout]) : timeout,
  });
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new ApiError(response.status, body.error ?? {});
  return body;
}

export const policies = (signal) => get(["policies"], {}, signal);
export const policy = (id, signal) => get(["policies", id], {}, signal);
export const steps = (id, query, signal) => get(["policies", id, "steps"], query, signal);
export const versions = (id, signal) => get(["policies", id, "weights"], {}, signal);
export const checkpoints = (id, signal) => get(["policies", id, "checkpoints"], {}, signal);
export const operations = (query, signal) => get(["operations"], query, signal);

// The operation of a seq, or null: a page may be empty and not the last.
export async function operationAt(id, seq, signal) {
  let token = "";
  for (let page = 0; page < 100; page += 1) {
    const answer = await operations({ policy_id: id, seq, page_token: token }, signal);
    token = answer.next_page_token;
    if (answer.operations.length || !token) return answer.operations[0] ?? null;
  }
  return null;
}

export const rollouts = (id, seq, signal) => get(["policies", id, "steps", seq, "rollouts"], {}, signal);
export const rollout = (id, seq, group, index, signal) =>
  get(["policies", id, "steps", seq, "rollouts", group, index], {}, signal);

// What a list answers, or [] and why not: one list that is refused takes no other from the page.
export async function orNone(answer) {
  try {
    return { answer: await answer, why: "" };
  } catch (error) {
    if (error instanceof ApiError && error.status !== 401 && error.status < 500) {
      return { answer: null, why: error.message };
    }
    throw error;
  }
}
