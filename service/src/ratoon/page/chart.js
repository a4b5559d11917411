// Curves over steps, on a canvas, with a band around each, and marks. The plot is a slider for the
// keyboard and for screen readers: arrows move along the steps, Enter opens one.

import { h } from "./dom.js";
import { NONE, number } from "./format.js";

// What a chart leaves for the axis at least; wider numbers get what they need.
const LEFT = 46;
const GAP = 6;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 18;
const NEAR_PX = 9;

// A step that all charts of a view point at; null: none.
export function pointer() {
  const charts = new Set();
  return {
    x: null,
    add(redraw) {
      charts.add(redraw);
    },
    set(x) {
      if (x === this.x) return;
      this.x = x;
      for (const redraw of charts) redraw();
    },
  };
}

// Index of the value in ascending `xs` that is nearest to `x`; -1 of none.
export function nearest(xs, x) {
  let low = 0;
  let high = xs.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// [least, greatest] of series and their bands, widened where they are one; null without values.
function extent(series) {
  let low = Infinity;
  let high = -Infinity;
  for (const one of series) {
    for (const values of [one.mean, one.low ?? [], one.high ?? []]) {
      for (const value of values) {
        if (!isNumber(value)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
  }
  if (low > high) return null;
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - (low >= 0 && low - room < 0 ? low : room), high + room];
}

export function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = [10, 5, 2, 1].map((times) => times * power);
  // No more than `most`, unless that would be fewer than two: one number is no scale.
  const hasTwo = (one) => Math.floor(high / one) > Math.ceil(low / one);
  const step = steps[Math.max(steps.findLastIndex((one) => one >= rough), steps.findIndex(hasTwo))];
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high && found.length < 20; i += 1) found.push(i * step);
  return found;
}

// Ticks as texts, with so many digits that neighbours differ.
export function tickTexts(values) {
  const size = Math.max(...values.map(Math.abs));
  const step = values.length > 1 ? values[1] - values[0] : size;
  const digits = size ? Math.max(3, Math.ceil(Math.log10(size / step)) + 1) : 3;
  return values.map((value) => number(value, Math.min(digits, 15)));
}

// The sentence that stands for the picture.
export function summary(label, series, marks, unit) {
  const told = series.map((one) => {
    const known = one.mean.filter(isNumber);
    if (!known.length) return `${one.name}: no values`;
    let [least, most] = [0, 0];
    const values = one.mean;
    const first = values.findIndex(isNumber);
    least = most = first;
    for (let i = first; i < values.length; i += 1) {
      if (!isNumber(values[i])) continue;
      if (values[i] < values[least]) least = i;
      if (values[i] > values[most]) most = i;
    }
    const name = series.length > 1 ? `${one.name}: ` : "";
    return (
      `${name}from ${number(values[first])} to ${number(known.at(-1))}; ` +
      `least ${number(values[least])} at ${unit} ${one.x[least]}, ` +
      `greatest ${number(values[most])} at ${unit} ${one.x[most]}`
    );
  });
  const marked = marks.length ? ` ${marks.length} marked.` : "";
  return `${label} over ${unit}s. ${told.join(". ")}.${marked}`;
}

/**
 * options: label; unit ("step": what the x axis counts); tall; point (a `pointer`); onopen(x): a
 * point was chosen; marker(mark): the link of a mark, for charts with a lane of them.
 * set({series: [{name, color, x, mean, low, high}], marks: [{x, label, ...}]}): `color` is a name of a
 * CSS variable, `x` ascends, and absent values are null.
 */
export function chart({ label, unit = "step", tall = false, point = pointer(), onopen, marker }) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const plot = h("div", { class: "plot", role: "slider", tabindex: "0", "aria-label": label }, canvas);
  const value = h("span", { class: "value" });
  const told = h("p", { class: "sr" });
  const lane = marker ? h("div", { class: "lane", role: "group", "aria-label": `Marks of ${label}` }) : null;
  const element = h(
    "figure",
    { class: tall ? "chart tall" : "chart" },
    h("figcaption", null, h("span", { class: "label" }, label), value),
    plot,
    lane,
    told,
  );
  let series = [];
  let marks = [];
  let range = [0, 1];
  let limits = null;
  let width = 0;
  let height = 0;
  let left = LEFT;
  let asked = 0;

  const toX = (x) => left + ((x - range[0]) / (range[1] - range[0] || 1)) * (width - left - RIGHT);
  const toY = (y) => TOP + (1 - (y - limits[0]) / (limits[1] - limits[0])) * (height - TOP - BOTTOM);
  const fromX = (px) => range[0] + ((px - left) / (width - left - RIGHT || 1)) * (range[1] - range[0]);

  function redraw() {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      draw();
    });
  }

  function draw() {
    tell();
    const ratio = devicePixelRatio || 1;
    width = plot.clientWidth;
    height = plot.clientHeight;
    if (!width || !height) return;
    const isResized = canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio);
    if (isResized) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const style = getComputedStyle(plot);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const ink = canvas.getContext("2d");
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    ink.clearRect(0, 0, width, height);
    ink.font = `11px ${style.fontFamily}`;
    const levels = limits ? ticks(limits[0], limits[1], Math.max(2, height / 44)) : [];
    const texts = tickTexts(levels);
    const before = left;
    left = Math.ceil(Math.max(LEFT, ...texts.map((text) => ink.measureText(text).width + GAP + 1)));
    if (isResized || left !== before) placeMarks();
    if (!limits) {
      ink.fillStyle = color("soft");
      ink.fillText("no values", left, height / 2);
      return;
    }
    drawAxes(ink, color, levels, texts);
    for (const mark of marks) {
      ink.strokeStyle = color("warn");
      ink.globalAlpha = 0.35;
      line(ink, [[toX(mark.x), TOP], [toX(mark.x), height - BOTTOM]]);
    }
    ink.globalAlpha = 1;
    ink.save();
    ink.beginPath();
    ink.rect(left, 0, width - left - RIGHT + 2, height - BOTTOM + 1);
    ink.clip();
    for (const one of series) drawSeries(ink, one, color(one.color));
    ink.restore();
    drawPointer(ink, color);
  }

  function drawAxes(ink, color, levels, texts) {
    ink.lineWidth = 1;
    ink.textAlign = "right";
    ink.textBaseline = "middle";
    for (const [i, level] of levels.entries()) {
      const y = Math.round(toY(level)) + 0.5;
      ink.strokeStyle = color("rule");
      line(ink, [[left, y], [width - RIGHT, y]]);
      ink.fillStyle = color("soft");
      ink.fillText(texts[i], left - GAP, y);
    }
    ink.textAlign = "center";
    ink.textBaseline = "alphabetic";
    for (const tick of ticks(range[0], range[1], Math.max(2, width / 110))) {
      if (!Number.isInteger(tick)) continue;
      const text = number(tick);
      ink.fillText(text, Math.min(toX(tick), width - ink.measureText(text).width / 2), height - 4);
    }
  }

  function drawSeries(ink, one, color) {
    ink.fillStyle = ink.strokeStyle = color;
    if (one.low?.length) {
      ink.globalAlpha = 0.16;
      for (const [start, stop] of runs(one.low, one.high)) {
        ink.beginPath();
        for (let i = start; i < stop; i += 1) ink.lineTo(toX(one.x[i]), toY(one.high[i]));
        for (let i = stop - 1; i >= start; i -= 1) ink.lineTo(toX(one.x[i]), toY(one.low[i]));
        ink.fill();
      }
      ink.globalAlpha = 1;
    }
    ink.lineWidth = 1.6;
    ink.lineJoin = "round";
    for (const [start, stop] of runs(one.mean, one.mean)) {
      ink.beginPath();
      for (let i = start; i < stop; i += 1) ink.lineTo(toX(one.x[i]), toY(one.mean[i]));
      ink.stroke();
      if (stop - start === 1) dot(ink, toX(one.x[start]), toY(one.mean[start]), 1.8);
    }
    const last = one.mean.findLastIndex(isNumber);
    if (last >= 0) dot(ink, toX(one.x[last]), toY(one.mean[last]), 2.4);
  }

  function drawPointer(ink, color) {
    if (point.x === null) return;
    const at = toX(point.x);
    if (at < left - 1 || at > width - RIGHT + 1) return;
    ink.lineWidth = 1;
    ink.strokeStyle = color("soft");
    line(ink, [[at, TOP], [at, height - BOTTOM]]);
    for (const one of series) {
      const i = nearest(one.x, point.x);
      if (i < 0 || !isNumber(one.mean[i])) continue;
      ink.fillStyle = color(one.color);
      dot(ink, toX(one.x[i]), toY(one.mean[i]), 3);
    }
  }

  // Text of the step that is pointed at, else of the last one.
  function tell() {
    const texts = series.map((one) => {
      const i = point.x === null ? one.mean.findLastIndex(isNumber) : nearest(one.x, point.x);
      const text = i < 0 ? NONE : number(one.mean[i]);
      const band = i >= 0 && point.x !== null && isNumber(one.low?.[i]) && one.low[i] !== one.high[i];
      return {
        short: text,
        long: band ? `${text} (${number(one.low[i])} to ${number(one.high[i])})` : text,
        name: one.name,
        x: i < 0 ? null : one.x[i],
      };
    });
    const one = texts[0];
    if (texts.length === 1) {
      value.textContent = point.x === null ? one.short : `${unit} ${one.x} · ${one.long}`;
    } else {
      value.textContent = point.x === null ? "" : `${unit} ${Math.round(point.x)}`;
    }
    const x = point.x ?? range[1];
    plot.setAttribute("aria-valuemin", range[0]);
    plot.setAttribute("aria-valuemax", range[1]);
    plot.setAttribute("aria-valuenow", x);
    const marked = marks.filter((mark) => mark.x === x).map((mark) => `, ${mark.label}`);
    const spoken = texts.map((text) => (texts.length > 1 ? `${text.name} ${text.long}` : text.long));
    plot.setAttribute("aria-valuetext", `${unit} ${Math.round(x)}: ${spoken.join(", ")}${marked.join("")}`);
  }

  // One link for marks that would lie on each other: it leads to the newest of them.
  function placeMarks() {
    if (!lane || !width) return;
    const places = new Map();
    for (const mark of marks) {
      const place = Math.round(toX(mark.x) / 12);
      places.set(place, [...(places.get(place) ?? []), mark]);
    }
    const focused = lane.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    lane.replaceChildren(
      ...[...places.values()].map((few) => {
        const link = marker(few.at(-1), few);
        link.style.left = `${toX(few.at(-1).x)}px`;
        return link;
      }),
    );
    if (focused) [...lane.children].find((link) => link.getAttribute("href") === focused)?.focus();
  }

  function points() {
    return series[0]?.x ?? [];
  }

  function at(event) {
    const x = fromX(event.clientX - plot.getBoundingClientRect().left);
    const mark = marks.find((one) => Math.abs(toX(one.x) - toX(x)) < NEAR_PX);
    if (mark) return mark.x;
    let best = null;
    for (const one of series) {
      const i = nearest(one.x, x);
      if (i >= 0 && (best === null || Math.abs(one.x[i] - x) < Math.abs(best - x))) best = one.x[i];
    }
    return best;
  }

  plot.addEventListener("pointermove", (event) => point.set(at(event)));
  plot.addEventListener("pointerleave", () => point.set(null));
  plot.addEventListener("click", (event) => {
    const x = at(event);
    if (x !== null) onopen?.(x);
  });
  plot.addEventListener("keydown", (event) => {
    const xs = points();
    if (!xs.length) return;
    const i = point.x === null ? xs.length - 1 : nearest(xs, point.x);
    const page = Math.max(1, Math.round(xs.length / 10));
    const moves = {
      ArrowLeft: i - 1,
      ArrowRight: i + 1,
      ArrowDown: i - 1,
      ArrowUp: i + 1,
      PageDown: i - page,
      PageUp: i + page,
      Home: 0,
      End: xs.length - 1,
    };
    if (event.key === "Enter") onopen?.(xs[i]);
    else if (event.key === "Escape") point.set(null);
    else if (event.key in moves) point.set(xs[Math.min(Math.max(moves[event.key], 0), xs.length - 1)]);
    else return;
    event.preventDefault();
  });
  plot.addEventListener("blur", () => point.set(null));

  point.add(redraw);
  new ResizeObserver(redraw).observe(plot);
  return {
    element,
    redraw,
    set(data) {
      series = data.series;
      marks = data.marks ?? [];
      limits = extent(series);
      const all = series.filter((one) => one.x.length);
      range = all.length ? [Math.min(...all.map((one) => one.x[0])), Math.max(...all.map((one) => one.x.at(-1)))] : [0, 1];
      told.textContent = summary(label, series, marks, unit);
      placeMarks();
      redraw();
    },
  };
}

// [start, stop) of the stretches in which both lists have numbers.
function* runs(first, second) {
  let start = -1;
  for (let i = 0; i <= first.length; i += 1) {
    const has = i < first.length && isNumber(first[i]) && isNumber(second[i]);
    if (has && start < 0) start = i;
    if (!has && start >= 0) {
      yield [start, i];
      start = -1;
    }
  }
}

function line(ink, points) {
  ink.beginPath();
  for (const [x, y] of points) ink.lineTo(x, y);
  ink.stroke();
}

function dot(ink, x, y, radius) {
  ink.beginPath();
  ink.arc(x, y, radius, 0, 2 * Math.PI);
  ink.fill();
}
