// Deaths, recoveries, stops and discards in time, below the curve that they may explain.

import { Chart } from "./charts.js";
import { fill, headings, make, notice, pill } from "./dom.js";
import { count, moment, STATE_KINDS } from "./format.js";

const KINDS = { death: "bad", health: "warn", checkpoint: "warn", recovery: "good" };

export async function eventsView(body, context) {
  let kind = context.query.kind ?? "";
  let chosen = context.query.event ?? null;
  let chart = null;
  const list = make("div", {});
  const kinds = make("div", { class: "toolbar", role: "group", "aria-label": "Kinds of events" });
  const older = make("button", { onclick: () => more() }, "Older events");
  const plot = make("div", {});
  const discards = make("section", { class: "card", "aria-label": "Discarded groups" });
  let shown = [];
  let before = null;
  let commands = [];
  let discarded = [];
  fill(body, plot, kinds, list, older, discards);

  function eventRow(event) {
    return make("tr", { class: String(event.id) === chosen ? "chosen" : "", "data-event": event.id }, make("td", {}, moment(event.time)), make("td", { class: "number" }, count(event.step)), make("td", {}, pill(event.kind, STATE_KINDS[event.state] ?? KINDS[event.kind] ?? "")), make("td", {}, event.subject), make("td", { class: "text" }, event.message));
  }

  async function update() {
    const asked = kind;
    const found = await context.ask("events", { kind });
    if (asked !== kind) return;
    addNewest(found);
    discarded = found.discarded;
    commands = found.commands.filter((event) => !kind || event.kind === kind);
    const names = [["", "all"], ...Object.keys(found.kinds).map((name) => [name, name])];
    fill(kinds, names.map(([name, title]) => make("button", { "aria-pressed": String(name === kind), "data-key": name, onclick: () => choose(name) }, name ? `${title} ${count(found.kinds[name])}` : title)));
    draw();
    showDiscards(found.discards);
    await drawCurve();
  }

  // Older events that are shown already stay, unless so many are new that some between them are not known.
  function addNewest(found) {
    const oldest = found.events[found.events.length - 1]?.id;
    const older = shown.some(({ id }) => id >= oldest) ? shown.filter(({ id }) => id < oldest) : [];
    if (!older.length) before = found.before;
    shown = [...found.events, ...older];
  }

  async function choose(name) {
    kind = name;
    shown = [];
    await update();
  }

  async function drawCurve() {
    const marks = [...await context.ask("marks"), ...discarded].filter((event) => !kind || event.kind === kind);
    const series = await context.ask("series", { name: ["reward", "loss"] });
    const name = series.reward ? "reward" : "loss";
    if (!series[name]) return;
    chart ??= new Chart(name === "reward" ? "Reward" : "Loss");
    if (!chart.element.isConnected) fill(plot, chart.element);
    chart.update([{ label: name, ...series[name], place: 0 }], { marks, onmark });
  }

  // A mark above the curve leads to its event, or to the groups that were discarded.
  function onmark({ id, kind: name, subject }) {
    if (name === "discard") context.go("groups", { reason: subject, state: "DISCARDED" });
    else reveal(String(id));
  }

  // Chooses an event and scrolls to it, once, so that a refresh takes no reader away from where he is.
  async function reveal(id) {
    chosen = id;
    while (before !== null && ![...commands, ...shown].some((event) => String(event.id) === id || event.id <= id)) {
      if (!await more()) return;
    }
    draw();
    list.querySelector(".chosen")?.scrollIntoView({ block: "center" });
  }

  function draw() {
    const oldest = before === null ? -Infinity : shown[shown.length - 1].time;
    const rows = [...commands.filter(({ time, id }) => time >= oldest || id === chosen), ...shown].sort((one, other) => other.time - one.time).map(eventRow);
    const head = headings(["Time", "Step", "Kind", "Part", "What happened"], ["Step"]);
    fill(list, rows.length ? make("div", { class: "card table" }, make("table", { class: "events" }, head, make("tbody", {}, rows))) : notice("nothing has happened: no death, no recovery, no health rule that tripped"));
    older.hidden = before === null;
  }

  // Adds older events; returns false if the list has become another one meanwhile.
  async function more() {
    const asked = [kind, before];
    const found = await context.ask("events", { kind, before });
    if (asked[0] !== kind || asked[1] !== before) return false;
    shown = [...shown, ...found.events];
    before = found.before;
    draw();
    return true;
  }

  function showDiscards(rows) {
    discards.hidden = rows.length === 0;
    fill(discards, make("h3", {}, "Discarded groups"), make("table", {}, headings(["Groups", "First", "Last", "Reason"], ["Groups"]),
      make("tbody", {}, rows.map((row) => make("tr", {}, make("td", { class: "number" }, make("a", { href: context.link("groups", { reason: row.reason, state: "DISCARDED" }) }, count(row.count))), make("td", {}, moment(row.first)), make("td", {}, moment(row.last)), make("td", { class: "text" }, row.reason))))));
  }

  async function start() {
    await update();
    if (chosen !== null) await reveal(chosen);
  }

  return { shown: start, update, redraw: drawCurve, close: () => chart?.destroy() };
}
