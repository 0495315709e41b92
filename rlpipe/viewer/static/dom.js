// Elements are made here, and nowhere from text: whatever a model wrote becomes a text node, never markup.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

// Whatever has the keyboard's focus in the element gets it again, or else the control that takes its place: a live run
// is drawn anew every two seconds.
export function fill(element, ...children) {
  const focused = element.contains(document.activeElement) && element !== document.activeElement ? document.activeElement : null;
  const place = focused ? sameControls(element, focused).indexOf(focused) : 0;
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  const next = focused?.isConnected ? focused : focused && sameControls(element, focused)[place];
  if (next && next !== document.activeElement) next.focus({ preventScroll: true });
  return element;
}

// The controls that are called the same; `data-key` is for those whose texts change.
function sameControls(element, control) {
  const name = (other) => other.dataset.key ?? other.getAttribute("aria-label") ?? other.getAttribute("name") ?? other.textContent;
  return [...element.querySelectorAll(control.tagName)].filter((other) => name(other) === name(control));
}

export function labelled(text, control) {
  return make("label", { class: "field" }, make("span", {}, text), control);
}

export function choose(name, choices, value, onchange) {
  const options = choices.map(([key, text]) => make("option", { value: key, selected: key === value }, text));
  return make("select", { name, onchange }, options);
}

// The head of a table; the columns named in `numbers` are aligned to the right.
export function headings(titles, numbers = []) {
  const cells = titles.map((title) => make("th", { scope: "col", class: numbers.includes(title) ? "number" : "" }, title));
  return make("thead", {}, make("tr", {}, cells));
}

export function pill(text, kind) {
  return make("span", { class: `pill ${kind}` }, text);
}

export function notice(text, kind = "") {
  return make("p", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status" }, text);
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const tooltip = () => document.getElementById("tooltip");

export function showTooltip(lines, x, y) {
  const box = fill(tooltip(), lines.map((line) => make("div", {}, line)));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.min(x + 12, innerWidth - width - 8)}px`;
  box.style.top = `${y + 16 + height > innerHeight ? y - height - 10 : y + 16}px`;
}

export function hideTooltip() {
  fill(tooltip()).hidden = true;
}
