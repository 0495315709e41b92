// The parts of a run: engines, scorers and ranks, as its controller last saw them, and where the groups are.

import { fill, headings, make, notice, pill } from "./dom.js";
import { count, moment, span, NONE, STATE_KINDS } from "./format.js";

const KINDS = [["engine", "Engines"], ["scorer", "Scorers"], ["episodes", "Episodes"], ["rank", "Learner ranks"]];
const NUMBERS = ["Version", "Step", "Queue", "Groups", "Newest version", "Mean seconds"];
const WAY = [["ADMITTED", "being generated"], ["GENERATED", "being scored"], ["SCORED", "waiting for a step"], ["ASSIGNED", "in a step"], ["TRAINED", "trained"], ["DISCARDED", "discarded"]];

export async function partsView(body, context) {
  async function update() {
    const found = await context.ask("parts");
    const age = found.time === null ? 0 : Math.max(found.now - found.time, 0);
    const over = !["running", "silent"].includes(context.runs[context.run].state);
    fill(body, groupsByState(found.states, context),
      found.time === null ? notice(`this run has recorded no states of its parts${found.engines?.length ? "; what its groups tell about its engines is below" : ""}`) : make("p", { class: "muted" }, `seen last ${moment(found.time)}${over ? ", before the run ended" : ` (${span(age)} ago)`}`),
      KINDS.map(([kind, title]) => partTable(title, found.parts.filter((part) => part.kind === kind), age, over)), engineTable(found.engines));
  }
  await update();
  const timer = setInterval(() => { if (!document.hidden && ["running", "silent"].includes(context.runs[context.run].state)) update().catch(() => {}); }, 5000);
  return { update, close: () => clearInterval(timer) };
}

function groupsByState(states, context) {
  if (!states) return null;
  return make("section", { class: "way", "aria-label": "Groups by state" }, WAY.map(([state, text]) => make("a", { class: "card stage", "data-key": state, href: context.link("groups", { state }) }, make("b", {}, count(states[state] ?? 0)), make("span", {}, text))));
}

function heard(part, age, over) {
  if (part.heard_s === null) return NONE;
  return over ? `${span(part.heard_s)} before` : `${span(part.heard_s + age)} ago`;
}

function partTable(title, parts, age, over) {
  if (!parts.length) return null;
  const head = ["Name", "State", "Version", "Step", "Queue", "Last heard", "Note"];
  const rows = parts.map((part) => make("tr", {}, make("td", {}, part.name), make("td", {}, pill(part.state, STATE_KINDS[part.state] ?? "")), make("td", { class: "number" }, count(part.version)), make("td", { class: "number" }, count(part.step)), make("td", { class: "number" }, count(part.queue)), make("td", {}, heard(part, age, over)), make("td", { class: "text" }, part.note)));
  return make("section", { class: "card table", "aria-label": title }, make("h3", {}, title), make("table", { class: "parts" }, headings(head, NUMBERS), make("tbody", {}, rows)));
}

function engineTable(engines) {
  if (!engines?.length) return null;
  const head = ["Engine", "Groups", "Newest version", "Mean seconds", "Last group"];
  const rows = engines.map((engine) => make("tr", {}, make("td", {}, engine.engine), make("td", { class: "number" }, count(engine.groups)), make("td", { class: "number" }, count(engine.version)), make("td", { class: "number" }, engine.seconds === null ? NONE : engine.seconds.toFixed(2)), make("td", {}, moment(engine.last))));
  return make("section", { class: "card table", "aria-label": "Work of the engines" }, make("h3", {}, "Work of the engines"), make("table", {}, headings(head, NUMBERS), make("tbody", {}, rows)));
}
