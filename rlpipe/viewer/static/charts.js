// One chart of metrics over steps, by uPlot: zoomed and pointed at together with all others, smoothed, with events on top.

import { colour, hideTooltip, make, showTooltip } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 190;
const MAX_MARKS = 40;
const SELDOM = 10;
const COLOURS = ["series-0", "series-1", "series-2", "series-3", "series-4", "series-5", "series-6", "series-7"];

export function seriesColour(place) {
  return colour(COLOURS[place % COLOURS.length]);
}

// The exponential moving mean of a series, corrected for its start, as TensorBoard draws it.
export function smooth(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return mean / total;
  });
}

function withAlpha(hex, alpha) {
  return `${hex}${Math.round(alpha * 255).toString(16).padStart(2, "0")}`;
}

function axes() {
  const stroke = () => colour("muted");
  const grid = { stroke: () => colour("grid"), width: 1 };
  const ticks = { stroke: () => colour("grid"), size: 4 };
  const font = "11px system-ui, sans-serif";
  return [
    { stroke, grid: { show: false }, ticks, font, size: 28, values: (_, splits) => splits.map((step) => Number.isInteger(step) ? step.toLocaleString("en") : "") },
    { stroke, grid, ticks, font, size: 52, values: (_, splits) => splits.map(number) },
  ];
}

// `lines` are {label, steps, values, place}; `place` is the number of its colour.
export class Chart {
  constructor(title, { stacked = false, note = "" } = {}) {
    this.stacked = stacked;
    this.plot = null;
    this.lines = [];
    this.allMarks = [];
    this.marks = [];  // those of the shown range
    this.waiting = null;  // what is drawn once the mouse is released
    this.isDragged = false;
    this.body = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${title} over steps`, onkeydown: (event) => this.onKey(event) });
    this.legend = make("div", { class: "legend" });
    this.body.addEventListener("focus", () => this.legend.setAttribute("aria-live", "polite"));
    this.body.addEventListener("blur", () => this.legend.removeAttribute("aria-live"));
    this.body.addEventListener("mousedown", () => this.hold());
    this.element = make("section", { class: "card chart", "aria-label": title, "data-title": title },
      make("h3", {}, title, note && make("small", {}, note)), this.body, this.legend);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.body);
  }

  size() {
    return { width: Math.max(this.body.clientWidth, 120), height: HEIGHT };
  }

  // A range that is being dragged would be lost if the chart were drawn anew under the mouse.
  hold() {
    this.isDragged = true;
    addEventListener("mouseup", () => {
      this.isDragged = false;
      if (this.waiting && this.plot) this.update(...this.waiting);
    }, { once: true });
  }

  update(lines, options = {}) {
    this.waiting = this.isDragged ? [lines, options] : null;
    if (this.isDragged) return;
    const { smoothing = 0, marks = [], onmark = () => {}, onzoom = (range) => this.zoomTo(range) } = options;
    const zoom = this.plot && this.zoomed() ? { ...this.plot.scales.x } : null;
    const pointed = this.plot?.data[0][this.plot.cursor.idx];
    [this.lines, this.allMarks, this.onmark, this.onzoom] = [lines, marks, onmark, onzoom];
    const drawn = this.stacked ? this.stack(lines) : this.overlay(lines, smoothing);
    const look = JSON.stringify([drawn.series, drawn.bands]);
    const isSame = this.plot && look === this.look;
    this.look = look;
    if (isSame) this.plot.setData(drawn.data, !zoom);
    else this.build(drawn);
    if (zoom) this.plot.setScale("x", { min: zoom.min, max: zoom.max });
    const isByMouse = isSame && document.activeElement !== this.body;  // which stays where it is
    if (pointed !== undefined && !isByMouse) this.pointLater(pointed);
    this.showValues();
  }

  build(drawn) {
    this.plot?.destroy();
    const options = {
      ...this.size(), series: [{ label: "step" }, ...drawn.series], bands: drawn.bands, axes: axes(), legend: { show: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => padded(low, high, this.stacked) } },
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, points: { size: 6 } },
      hooks: { draw: [() => this.placeMarks()], setCursor: [() => this.showValues()], setScale: [() => this.element.toggleAttribute("data-zoomed", this.zoomed())] },
    };
    this.plot = new uPlot(options, drawn.data, this.body);
  }

  zoomed() {
    const steps = this.plot?.data[0];
    const { min, max } = this.plot?.scales.x ?? {};
    return Boolean(steps?.length) && (min > steps[0] || max < steps[steps.length - 1]);
  }

  // Shows a range of steps, within those that there are; without a range, all of them.
  zoomTo(range = { min: -Infinity, max: Infinity }) {
    const steps = this.plot?.data[0] ?? [];
    const [min, max] = [Math.max(range.min, steps[0]), Math.min(range.max, steps[steps.length - 1])];
    if (min < max) this.plot.setScale("x", { min, max });
  }

  // Moves the pointer of all charts to a step.
  pointTo(step) {
    this.plot.setCursor({ left: this.plot.valToPos(step, "x"), top: HEIGHT / 3 }, true, true);
  }

  // A new plot, or a new zoom, has its scales only after all charts are drawn.
  pointLater(step) {
    requestAnimationFrame(() => { if (this.plot) this.pointTo(step); });
  }

  // The point of the curves that each mark is at: the one of its step, or else the one before it.
  places() {
    return this.marks.map(({ step }) => (step === null ? null : Math.max(this.plot.data[0].findLastIndex((one) => one <= step), 0)));
  }

  marksAt(index) {
    const places = this.places();
    return this.marks.filter((_, number) => places[number] === index);
  }

  // Left and right go from step to step, e and E from event to event, Enter opens the event; + zooms in on the step,
  // - out, 0 and Escape go back to all steps.
  onKey(event) {
    const steps = this.plot?.data[0] ?? [];
    if (!steps.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = this.plot.scales.x;
    const at = this.plot.cursor.idx ?? steps.findLastIndex((step) => step <= max);
    const zooms = { "+": 0.5, "=": 0.5, "-": 2 };
    const isShown = (index) => steps[index] >= min && steps[index] <= max;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const next = Math.min(Math.max(at + (event.key === "ArrowLeft" ? -1 : 1), 0), steps.length - 1);
      if (isShown(next)) this.pointTo(steps[next]);
    } else if (event.key === "e" || event.key === "E") {
      const back = event.key === "E";
      const start = this.plot.cursor.idx ?? (back ? Infinity : -1);
      const beyond = this.places().filter((place) => place !== null && isShown(place) && (back ? place < start : place > start));
      if (beyond.length) this.pointTo(steps[back ? Math.max(...beyond) : Math.min(...beyond)]);
    } else if (event.key === "Enter" && this.marksAt(this.plot.cursor.idx).length) {
      this.onmark(this.marksAt(this.plot.cursor.idx)[0]);
    } else if (event.key in zooms) {
      const factor = Math.max(zooms[event.key], Math.min(1, 1 / (max - min)));
      const around = factor > 1 ? (min + max) / 2 : steps[at];  // else - at an edge would hardly widen the other side
      this.onzoom({ min: around - (around - min) * factor, max: around + (max - around) * factor });
      this.pointLater(steps[at]);
    } else if (event.key === "0" || event.key === "Escape") this.onzoom();
    else return;
    event.preventDefault();
  }

  overlay(lines, smoothing) {
    const tables = [];
    const series = [];
    for (const { label, steps, values, place, dash } of lines) {
      // A gap shows where a metric was not finite, unless it often is, as the reward of a function that seldom applies.
      const spanGaps = values.filter((value) => value === null).length * SELDOM > values.length;
      const stroke = seriesColour(place);
      const few = steps.length < 40;
      const columns = smoothing ? [values, smooth(values, smoothing)] : [values];
      tables.push([steps, ...columns]);
      if (smoothing) series.push({ label: "", stroke: withAlpha(stroke, 0.28), width: 1, points: { show: false }, spanGaps });
      series.push({ label, stroke, width: 2, dash, points: { show: few && !smoothing, size: 5, fill: stroke }, spanGaps });
    }
    return { data: tables.length ? uPlot.join(tables.map(ordered)) : [[]], series, bands: [] };
  }

  // Areas on top of each other: each line is drawn at its own value plus those of the lines before it.
  stack(lines) {
    const tables = lines.map(({ steps, values }) => ordered([steps, values]));
    const steps = tables.reduce((longest, [own]) => (own.length > longest.length ? own : longest), []);
    const data = [steps];
    const sums = new Array(steps.length).fill(0);
    for (const table of tables) {
      onSteps(steps, table).forEach((value, index) => { sums[index] += value; });
      data.push([...sums]);
    }
    const series = lines.map(({ label, place }, index) => {
      const stroke = seriesColour(place);
      return { label, stroke, fill: index === 0 ? withAlpha(stroke, 0.45) : undefined, width: 1, points: { show: false } };
    });
    const bands = lines.slice(1).map(({ place }, index) => ({ series: [index + 2, index + 1], fill: withAlpha(seriesColour(place), 0.45) }));
    return { data, series, bands };
  }

  // The names of the lines, with their values at the pointer, or else their newest ones; and what happened there.
  showValues() {
    const index = this.plot?.cursor.idx;
    const step = this.plot?.data[0][index] ?? null;
    const entries = this.lines.map(({ label, steps, values, place }) => {
      const at = step === null ? values.length - 1 : lastUpTo(steps, step);
      return make("span", { class: "key" }, make("i", { style: { backgroundColor: seriesColour(place) } }), `${label} `, make("b", {}, number(values[at] ?? null)));
    });
    const events = step === null ? [] : this.marksAt(index).map(({ kind, message }) => make("span", { class: "event" }, `${kind}: ${message}`));
    this.legend.replaceChildren(...entries, step === null ? "" : make("span", { class: "at" }, `step ${step.toLocaleString("en")}`), ...events);
  }

  placeMarks() {
    const { over } = this.plot;
    over.querySelectorAll(".mark").forEach((mark) => mark.remove());
    const { min, max } = this.plot.scales.x;
    this.marks = mostImportant(this.allMarks.filter(({ step }) => step !== null && step >= min && step <= max));
    for (const mark of this.marks.toReversed()) {  // the most important on top
      const left = this.plot.valToPos(mark.step, "x");
      over.append(make("button", {
        class: `mark ${mark.kind}`, tabindex: "-1", style: { left: `${left}px` }, "aria-label": `step ${mark.step}, ${mark.kind}: ${mark.message}`,
        onmousedown: (event) => event.stopPropagation(), onclick: () => this.onmark(mark),
        onmouseenter: (event) => showTooltip([`${mark.run ? `${mark.run} · ` : ""}step ${mark.step} · ${mark.kind}`, mark.message], event.clientX, event.clientY), onmouseleave: hideTooltip,
      }));
    }
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
  }
}

// Steps in order, each once with its newest value: a resumed run may have logged an evaluation twice.
function ordered([steps, ...columns]) {
  if (steps.every((step, index) => !index || steps[index - 1] < step)) return [steps, ...columns];
  const places = new Map(steps.map((step, index) => [step, index]));
  const kept = [...places.keys()].sort((one, other) => one - other);
  return [kept, ...columns.map((column) => kept.map((step) => column[places.get(step)]))];
}

// A line's values at the steps of another, longer one: the mean of those since its step before, 0 where there are none.
function onSteps(steps, [own, values]) {
  let next = 0;
  return steps.map((step, index) => {
    let sum = 0, count = 0;
    for (; next < own.length && (own[next] <= step || index === steps.length - 1); next += 1) {
      if (values[next] !== null) { sum += values[next]; count += 1; }
    }
    return count ? sum / count : 0;
  });
}

// As many marks as can be told apart, from all parts of the range: deaths before others, discarded groups last.
function mostImportant(marks) {
  const chosen = [];
  for (const isOf of [({ kind }) => kind === "death", ({ kind }) => kind !== "death" && kind !== "discard", ({ kind }) => kind === "discard"]) {
    const newest = marks.filter(isOf).sort((one, other) => other.time - one.time);
    chosen.push(...evenly(newest, MAX_MARKS - chosen.length));
  }
  return chosen;
}

function evenly(items, most) {
  return items.length <= most ? items : Array.from({ length: most }, (_, place) => items[Math.floor(place * items.length / most)]);
}

function padded(low, high, fromZero) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  return [fromZero ? 0 : low - room, high + room];
}

// The place of a line's newest value at a step; -1 before its first and after its last step.
function lastUpTo(steps, step) {
  return step > steps[steps.length - 1] ? -1 : steps.findLastIndex((one) => one <= step);
}
