// A prefix forest as an icicle: tokens from left to right, rollouts from top to bottom. A node's area
// is what its tokens would cost if every rollout computed them; its width alone is what they do cost.

import { h, say } from "./dom.js";
import { number } from "./format.js";

const SHADES = 15;
const MOST_ZOOM = 4000;
const ZOOM_STEP = 1.5;
const GLIDE_MS = 180;

/**
 * Where each node lies: x and width in tokens, y and height in rollouts. Nodes whose parents are
 * missing or go round in a circle are left out: `order` has those that are drawn, parents first.
 */
export function layout(forest) {
  const count = forest.parent.length;
  const children = Array.from({ length: count }, () => []);
  const roots = [];
  for (let i = 0; i < count; i += 1) {
    const parent = forest.parent[i];
    if (parent < 0) roots.push(i);
    else children[parent]?.push(i);
  }
  const x = new Float64Array(count);
  const y = new Float64Array(count);
  const order = [];
  let tokens = 0;
  let rollouts = 0;
  const place = (few, at, top) => {
    for (const i of few) {
      x[i] = at;
      y[i] = top;
      top += forest.num_rollouts[i];
    }
    return top;
  };
  rollouts = place(roots, 0, 0);
  const open = roots.toReversed();
  while (open.length) {
    const i = open.pop();
    order.push(i);
    tokens = Math.max(tokens, x[i] + forest.num_tokens[i]);
    place(children[i], x[i] + forest.num_tokens[i], y[i]);
    open.push(...children[i].toReversed());
  }
  return { x, y, order, children, roots, tokens: Math.max(tokens, 1), rollouts: Math.max(rollouts, 1) };
}

// A colour as a canvas keeps it: little-endian, red first.
function pixel([red, green, blue]) {
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

// `onopen(node)` opens the rollout that ends at a node; it returns whether there is one.
export function icicle({ onopen }) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const plot = h("div", { class: "plot", role: "application", tabindex: "0", "aria-roledescription": "prefix forest" }, canvas);
  const detail = h("p", { class: "detail" });
  const button = (name, act) => h("button", { type: "button", onclick: act }, name);
  const element = h("div", { class: "icicle" },
    h("div", { class: "tools" }, button("Zoom in", () => zoom(ZOOM_STEP)), button("Zoom out", () => zoom(1 / ZOOM_STEP)), button("Whole", whole), detail),
    plot);
  let forest = null;
  let place = null;
  let shades = null; // of each node
  let colors = []; // of the shades, as pixels
  let image = null; // ten thousand rectangles are quicker as pixels than as strokes of the canvas
  let range = null;
  let view = { x: 0, y: 0, zoomX: 1, zoomY: 1 };
  let selected = -1;
  let width = 0;
  let height = 0;
  let asked = 0;
  let glide = 0;

  function redraw() {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      draw();
    });
  }

  function readColors() {
    const style = getComputedStyle(plot);
    const stop = (name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number);
    const [low, middle, high] = ["--ramp-low", "--ramp-middle", "--ramp-high"].map(stop);
    colors = Array.from({ length: SHADES }, (_, i) => {
      const at = (2 * i) / (SHADES - 1);
      const [from, to, share] = at <= 1 ? [low, middle, at] : [middle, high, at - 1];
      return pixel(from.map((one, c) => Math.round(one + (to[c] - one) * share)));
    });
    colors.push(pixel(stop("--ramp-none")));
  }

  const scaleX = () => (width / place.tokens) * view.zoomX;
  const scaleY = () => (height / place.rollouts) * view.zoomY;

  function draw() {
    const ratio = devicePixelRatio || 1;
    width = plot.clientWidth;
    height = plot.clientHeight;
    if (!place || !width || !height) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    if (!colors.length) readColors();
    const ink = canvas.getContext("2d");
    const named = paint(ratio);
    ink.putImageData(image, 0, 0);
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    const [byX, byY] = [scaleX(), scaleY()];
    drawNames(ink, named, byX, byY);
    if (selected >= 0) {
      ink.lineWidth = 2;
      ink.strokeStyle = getComputedStyle(plot).getPropertyValue("--ink");
      ink.strokeRect(
        (place.x[selected] - view.x) * byX + 1,
        (place.y[selected] - view.y) * byY + 1,
        Math.max(forest.num_tokens[selected] * byX - 3, 1),
        Math.max(forest.num_rollouts[selected] * byY - 3, 1),
      );
    }
  }

  // Fills the image; returns the nodes that have room for their name.
  function paint(ratio) {
    if (image?.width !== canvas.width || image.height !== canvas.height) {
      image = new ImageData(canvas.width, canvas.height);
    }
    const pixels = new Uint32Array(image.data.buffer);
    pixels.fill(0);
    const [byX, byY] = [scaleX() * ratio, scaleY() * ratio];
    const [wide, high] = [canvas.width, canvas.height];
    const named = [];
    for (const i of place.order) {
      const left = Math.max(Math.round((place.x[i] - view.x) * byX), 0);
      const right = Math.round((place.x[i] + forest.num_tokens[i] - view.x) * byX);
      const top = Math.max(Math.round((place.y[i] - view.y) * byY), 0);
      const bottom = Math.round((place.y[i] + forest.num_rollouts[i] - view.y) * byY);
      if (left >= wide || top >= high || right < 0 || bottom < 0) continue;
      // A gap to the next one where there is room, and a pixel at least where there is none.
      const stop = Math.min(Math.max(right - (right - left > 3 ? 1 : 0), left + 1), wide);
      const end = Math.min(Math.max(bottom - (bottom - top > 3 ? 1 : 0), top + 1), high);
      const color = colors[shades[i]];
      for (let row = top; row < end; row += 1) pixels.fill(color, row * wide + left, row * wide + stop);
      if (end - top >= 15 * ratio && stop - left >= 74 * ratio) named.push(i);
    }
    return named;
  }

  function drawNames(ink, named, byX, byY) {
    const style = getComputedStyle(plot);
    ink.font = `11px ${style.fontFamily}`;
    ink.fillStyle = style.getPropertyValue("--ramp-ink");
    ink.textBaseline = "middle";
    for (const i of named.slice(0, 400)) {
      const left = Math.max((place.x[i] - view.x) * byX, 0);
      const right = (place.x[i] + forest.num_tokens[i] - view.x) * byX;
      const top = Math.max((place.y[i] - view.y) * byY, 0);
      const bottom = Math.min((place.y[i] + forest.num_rollouts[i] - view.y) * byY, height);
      if (right - left < 70 || bottom - top < 13) continue;
      const times = forest.num_rollouts[i] > 1 ? ` × ${forest.num_rollouts[i]}` : "";
      ink.fillText(`${forest.num_tokens[i]}${times}`, left + 6, (top + bottom) / 2);
    }
  }

  function told(i) {
    const reward = forest.reward_mean[i];
    const many = forest.num_rollouts[i];
    return (
      `${number(forest.num_tokens[i])} tokens from ${number(place.x[i])}, ` +
      `${many === 1 ? "1 rollout" : `shared by ${number(many)} rollouts`}` +
      (reward === null ? "" : `, reward ${number(reward)}`)
    );
  }

  function select(i, { isSpoken = false } = {}) {
    if (i === selected) return;
    selected = i;
    detail.textContent = i < 0 ? "" : told(i);
    if (isSpoken && i >= 0) say(told(i));
    redraw();
  }

  function bounded(next) {
    const zoomX = Math.min(Math.max(next.zoomX, 1), MOST_ZOOM);
    const zoomY = Math.min(Math.max(next.zoomY, 1), MOST_ZOOM);
    return {
      zoomX,
      zoomY,
      x: Math.min(Math.max(next.x, 0), place.tokens * (1 - 1 / zoomX)),
      y: Math.min(Math.max(next.y, 0), place.rollouts * (1 - 1 / zoomY)),
    };
  }

  function glideTo(next) {
    cancelAnimationFrame(glide);
    const [from, to, begun] = [view, bounded(next), performance.now()];
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      view = to;
      redraw();
      return;
    }
    const move = (now) => {
      const share = Math.min(1, Math.max(0, (now - begun) / GLIDE_MS));
      const eased = 1 - (1 - share) ** 3;
      view = Object.fromEntries(Object.keys(to).map((key) => [key, from[key] + (to[key] - from[key]) * eased]));
      draw();
      if (share < 1) glide = requestAnimationFrame(move);
    };
    glide = requestAnimationFrame(move);
  }

  // Zooms about a place of the plot, in pixels; by default its centre.
  function zoom(times, at = [width / 2, height / 2], isGliding = true) {
    if (!place) return;
    const zoomX = Math.min(Math.max(view.zoomX * times, 1), MOST_ZOOM);
    const zoomY = Math.min(Math.max(view.zoomY * times, 1), MOST_ZOOM);
    const x = view.x + at[0] / scaleX() - (at[0] / width) * (place.tokens / zoomX);
    const y = view.y + at[1] / scaleY() - (at[1] / height) * (place.rollouts / zoomY);
    if (isGliding) return glideTo({ x, y, zoomX, zoomY });
    view = bounded({ x, y, zoomX, zoomY });
    redraw();
  }

  function whole() {
    if (place) glideTo({ x: 0, y: 0, zoomX: 1, zoomY: 1 });
  }

  function zoomTo(i) {
    const zoomY = place.rollouts / forest.num_rollouts[i];
    glideTo({ x: 0, y: place.y[i], zoomX: 1, zoomY });
  }

  // Brings a node that the keyboard chose into view.
  function reveal(i) {
    const least = Math.min(view.zoomY, place.rollouts / forest.num_rollouts[i]);
    const zoomY = Math.max(least, Math.min((20 * place.rollouts) / (height * forest.num_rollouts[i]), MOST_ZOOM));
    const seen = place.rollouts / zoomY;
    const isIn = place.y[i] >= view.y && place.y[i] + forest.num_rollouts[i] <= view.y + seen;
    const y = isIn && zoomY === view.zoomY ? view.y : place.y[i] + forest.num_rollouts[i] / 2 - seen / 2;
    const seenX = place.tokens / view.zoomX;
    const x = place.x[i] >= view.x && place.x[i] < view.x + seenX ? view.x : place.x[i];
    glideTo({ x, y, zoomX: view.zoomX, zoomY });
  }

  function nodeAt(event) {
    const box = plot.getBoundingClientRect();
    const x = view.x + (event.clientX - box.left) / scaleX();
    const y = view.y + (event.clientY - box.top) / scaleY();
    return (
      place.order.find(
        (i) => x >= place.x[i] && x < place.x[i] + forest.num_tokens[i] && y >= place.y[i] && y < place.y[i] + forest.num_rollouts[i],
      ) ?? -1
    );
  }

  let drag = null;
  plot.addEventListener("pointerdown", (event) => {
    if (!place || event.button) return;
    drag = { x: event.clientX, y: event.clientY, view, moved: 0 };
    if (event.pointerType === "mouse") plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!place) return;
    if (!drag) return select(nodeAt(event));
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    drag.moved = Math.max(drag.moved, Math.abs(dx) + Math.abs(dy));
    cancelAnimationFrame(glide);
    view = bounded({ ...drag.view, x: drag.view.x - dx / scaleX(), y: drag.view.y - dy / scaleY() });
    redraw();
  });
  plot.addEventListener("pointerup", (event) => {
    const isClick = drag && drag.moved < 5;
    drag = null;
    if (!isClick) return;
    const i = nodeAt(event);
    select(i);
    if (i >= 0 && !onopen(i)) zoomTo(i);
  });
  plot.addEventListener("pointercancel", () => (drag = null));
  plot.addEventListener("pointerleave", () => !drag && document.activeElement !== plot && select(-1));
  plot.addEventListener("wheel", (event) => {
    // The page scrolls until the forest is entered.
    if (!place || (document.activeElement !== plot && !event.ctrlKey && !event.metaKey)) return;
    event.preventDefault();
    const box = plot.getBoundingClientRect();
    cancelAnimationFrame(glide);
    zoom(Math.exp(-event.deltaY / 300), [event.clientX - box.left, event.clientY - box.top], false);
  }, { passive: false });
  plot.addEventListener("keydown", (event) => {
    if (!place?.order.length) return;
    const parent = selected < 0 ? -1 : forest.parent[selected];
    const siblings = parent < 0 ? place.roots : place.children[parent];
    const among = siblings.indexOf(selected);
    const go = (i) => {
      if (i === undefined || i < 0) return;
      select(i, { isSpoken: true });
      reveal(i);
    };
    switch (event.key) {
      case "ArrowRight": go(selected < 0 ? place.roots[0] : place.children[selected][0]); break;
      case "ArrowLeft": go(parent); break;
      case "ArrowDown": go(siblings[Math.min(among + 1, siblings.length - 1)]); break;
      case "ArrowUp": go(siblings[Math.max(among - 1, 0)]); break;
      case "Home": go(place.roots[0]); break;
      case "End": go(place.roots.at(-1)); break;
      case "Enter": if (selected >= 0 && !onopen(selected)) zoomTo(selected); break;
      case "+": case "=": zoom(ZOOM_STEP); break;
      case "-": zoom(1 / ZOOM_STEP); break;
      case "0": case "Escape": whole(); break;
      default: return;
    }
    event.preventDefault();
  });

  new ResizeObserver(redraw).observe(plot);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const recolor = () => {
    colors = [];
    redraw();
  };
  scheme.addEventListener("change", recolor);
  return {
    element,
    set(given) {
      forest = given;
      place = layout(given);
      const known = given.reward_mean.filter((value) => value !== null);
      range = known.length ? known.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, -Infinity]) : null;
      const spread = range ? range[1] - range[0] : 0;
      shades = Uint8Array.from(given.reward_mean, (value) =>
        value === null ? SHADES : spread ? Math.round(((value - range[0]) / spread) * (SHADES - 1)) : (SHADES - 1) / 2);
      selected = -1;
      view = { x: 0, y: 0, zoomX: 1, zoomY: 1 };
      const packed = given.num_tokens.reduce((sum, one) => sum + one, 0);
      const alone = given.num_tokens.reduce((sum, one, i) => sum + one * given.num_rollouts[i], 0);
      plot.setAttribute("aria-label",
        `Prefix forest: ${number(place.order.length)} nodes, ${number(place.roots.length)} trees, ${number(place.rollouts)} rollouts; ` +
        `${number(packed)} tokens computed in place of ${number(alone)}. ` +
        "Arrow keys move along it, Enter opens a rollout or zooms, plus and minus zoom, Escape shows all.");
      redraw();
    },
    leave() {
      scheme.removeEventListener("change", recolor);
      cancelAnimationFrame(glide);
    },
  };
}
