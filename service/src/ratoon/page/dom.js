// Elements, and the text of them. Text is set as text nodes alone: nothing that came from the
// service is ever parsed as HTML.

// Controls, line separators and marks that change the direction of text: shown, not obeyed.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return String(text).replace(HIDDEN, (char) => {
    const code = char.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : `\u27e8${code.toString(16).padStart(4, "0")}\u27e9`;
  });
}

// `short` leaves the beginning and the end of a long id.
export function short(text, most = 40) {
  const shown = visible(text);
  return shown.length <= most ? shown : `${shown.slice(0, most - 9)}…${shown.slice(-8)}`;
}

// h("a", {href, class, onclick}, ...children): children are nodes, texts, lists of them or null.
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...nodes(children));
  return element;
}

function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : visible(child)));
}

// Fills `element` anew where `state` is not what it was filled from, and says whether that was so; who
// has the focus keeps it, by its `data-key`.
const filledFrom = new WeakMap();

export function fill(element, state, build) {
  const signature = JSON.stringify(state);
  if (filledFrom.get(element) === signature) return false;
  filledFrom.set(element, signature);
  const focused = element.contains(document.activeElement) && document.activeElement.dataset.key;
  element.replaceChildren(...nodes([build(state)]));
  if (focused) element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  return true;
}

export function say(text) {
  document.getElementById("said").textContent = visible(text);
}

// A table of `columns` [{name, cell(row), number, wide}] with a caption for who does not see it.
export function table(caption, columns, rows, { empty = "Nothing yet.", attributes } = {}) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const kind = (column) => (column.number ? "number" : column.wide ? "wide" : null);
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      null,
      h("caption", { class: "sr" }, caption),
      h("thead", null, h("tr", null, columns.map((one) => h("th", { scope: "col", class: kind(one) }, one.name)))),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h("tr", attributes?.(row), columns.map((one) => h("td", { class: kind(one) }, one.cell(row)))),
        ),
      ),
    ),
  );
}

export function panel(title, ...children) {
  const id = `panel-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { class: "panel", "aria-labelledby": id }, h("h2", { id }, title), children);
}

export function words(name) {
  return name.replaceAll("_", " ");
}

export function chip(text, kind) {
  return h("span", { class: `chip ${kind ?? ""}` }, words(text));
}
