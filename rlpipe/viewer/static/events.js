// Deaths, recoveries, stops and discards in time, below the curve that they may explain.

import { Chart } from "./charts.js";
import { fill, headings, make, notice, pill } from "./dom.js";
import { count, moment, STATE_KINDS } from "./format.js";

const KINDS = { death: "bad", health: "warn", checkpoint: "warn", recovery: "good" };

export async function eventsView(body, context) {
  let kind = context.query.kind ?? "";
  let chart = null;
  const list = make("div", {});
  const kinds = make("div", { class: "toolbar", role: "group", "aria-label": "Kinds of events" });
  const older = make("button", { onclick: () => more() }, "Older events");
  const plot = make("div", {});
  const discards = make("section", { class: "card", "aria-label": "Discarded groups" });
  let shown = [];
  let before = null;
  fill(body, plot, kinds, list, older, discards);

  function eventRow(event) {
    const chosen = String(event.id) === context.query.event;
    return make("tr", { class: chosen ? "chosen" : "", "data-event": event.id }, make("td", {}, moment(event.time)), make("td", { class: "number" }, count(event.step)), make("td", {}, pill(event.kind, KINDS[event.kind] ?? "")), make("td", {}, event.subject), make("td", { class: "text" }, event.message));
  }

  function ending(run) {
    if (run.state === "running") return [];
    return [make("tr", {}, make("td", {}, moment(run.ended_at)), make("td", { class: "number" }, count(run.step)), make("td", {}, pill("end", STATE_KINDS[run.state] ?? "")), make("td", {}, "run"), make("td", { class: "text" }, `${run.state}${run.error ? `: ${run.error}` : ""}`))];
  }

  async function update() {
    const found = await context.ask("events", { kind });
    [shown, before] = [found.events, found.before];
    const names = [["", "all"], ...Object.keys(found.kinds).map((name) => [name, name])];
    fill(kinds, names.map(([name, title]) => make("button", { "aria-pressed": String(name === kind), onclick: () => { kind = name; update(); } }, name ? `${title} ${count(found.kinds[name])}` : title)));
    draw();
    showDiscards(found.discards);
    await drawCurve();
  }

  async function drawCurve() {
    const series = await context.ask("series", { name: ["reward", "loss"] });
    const name = series.reward ? "reward" : "loss";
    if (!series[name]) return;
    chart ??= new Chart(name === "reward" ? "Reward" : "Loss");
    if (!chart.element.isConnected) fill(plot, chart.element);
    chart.update([{ label: name, ...series[name], place: 0 }], { marks: shown, onmark: choosing });
  }

  function choosing(mark) {
    const row = list.querySelector(`tr[data-event="${mark.id}"]`);
    list.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
    row?.classList.add("chosen");
    row?.scrollIntoView({ block: "center" });
  }

  function draw() {
    const rows = [...ending(context.runs[context.run]), ...shown.map(eventRow)];
    const head = headings(["Time", "Step", "Kind", "Part", "What happened"], ["Step"]);
    fill(list, rows.length ? make("div", { class: "card table" }, make("table", { class: "events" }, head, make("tbody", {}, rows))) : notice("nothing has happened: no death, no recovery, no health rule that tripped"));
    older.hidden = before === null;
    list.querySelector(".chosen")?.scrollIntoView({ block: "center" });
  }

  async function more() {
    const found = await context.ask("events", { kind, before });
    shown = [...shown, ...found.events];
    before = found.before;
    draw();
  }

  function showDiscards(rows) {
    discards.hidden = rows.length === 0;
    fill(discards, make("h3", {}, "Discarded groups"), make("table", {}, headings(["Groups", "First", "Last", "Reason"], ["Groups"]),
      make("tbody", {}, rows.map((row) => make("tr", {}, make("td", { class: "number" }, make("a", { href: context.link("groups", { reason: row.reason, state: "DISCARDED" }) }, count(row.count))), make("td", {}, moment(row.first)), make("td", {}, moment(row.last)), make("td", { class: "text" }, row.reason))))));
  }

  return { shown: update, update, redraw: drawCurve, close: () => chart?.destroy() };
}
