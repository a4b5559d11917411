// Numbers, sizes and times as text.

export const NONE = "–";

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4 || Number.isInteger(value)) {
    if (size < 1e12) return Math.round(value).toLocaleString("en-US").replaceAll(",", "\u202f").replace("-", "−");
  }
  if (size >= 1e6 || size < 1e-3) return value.toExponential(digits - 2).replace("e+", "e").replaceAll("-", "−");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${number(100 * value, 3)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let rank = 0;
  while (value >= 1024 && rank < units.length - 1) {
    value /= 1024;
    rank += 1;
  }
  return `${number(value, 3)} ${units[rank]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${number(seconds, 3)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${number(seconds / 86400, 3)} days`;
}

// Seconds between two RFC 3339 times; null where one is absent. A clock may have jumped between them.
export function between(start, stop) {
  return start && stop ? Math.max(0, (Date.parse(stop) - Date.parse(start)) / 1000) : null;
}

export function clock(at) {
  if (!at) return NONE;
  const time = new Date(typeof at === "number" ? at * 1000 : at);
  if (Number.isNaN(time.getTime())) return NONE;
  const hours = time.toLocaleTimeString("en-GB");
  return time.toDateString() === new Date().toDateString() ? hours : `${time.toLocaleDateString("sv-SE")} ${hours}`;
}
