// The frame of the page: which view is shown, of which runs, and when it is drawn anew.

import { choose, fill, hideTooltip, labelled, make, notice, pill } from "./dom.js";
import { count, STATE_KINDS } from "./format.js";
import { ask, exported } from "./source.js";
import { themeButton } from "./theme.js";
import { MAX_OVERLAID, overviewView } from "./overview.js";
import { groupsView } from "./groups.js";
import { groupView } from "./group.js";
import { eventsView } from "./events.js";
import { partsView } from "./parts.js";
import { compareView } from "./compare.js";

const POLL_MS = 2000;
const VIEWS = { overview: overviewView, groups: groupsView, group: groupView, events: eventsView, parts: partsView, compare: compareView };
const TABS = [["overview", "Overview"], ["groups", "Groups"], ["events", "Events"], ["parts", "Parts"], ["compare", "Compare"]];

const context = { runs: [], run: 0, shown: [0], query: {}, view: "overview", go, link, ask: (name, query = {}) => ask(name, { run: context.run, ...query }) };
const lastQuery = {};  // of each view, with the run that it was of
const scrolled = new Map();  // how far each address was scrolled
let current = null;
let generation = 0;
let drawing = false;
let refreshing = false;
let problem = null;  // why the view could not be drawn

function readAddress() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const query = Object.fromEntries(new URLSearchParams(search));
  context.view = Object.hasOwn(VIEWS, path) ? path : "overview";
  context.run = Math.min(Math.max(Number(query.run) || 0, 0), context.runs.length - 1);
  context.query = "run" in query ? { ...query, run: String(context.run) } : query;
  lastQuery[context.view] = { run: context.run, query };
  const shown = (query.shown ?? "").split(",").filter(Boolean).map(Number).filter((place) => place in context.runs);
  const all = context.runs.map((_, place) => place).slice(0, MAX_OVERLAID);
  const overlaid = shown.length ? shown : all;
  context.shown = overlaid.includes(context.run) ? overlaid : [...overlaid.slice(0, MAX_OVERLAID - 1), context.run];
}

// The address of a view; what stays the same from view to view is added.
function link(view, query = {}) {
  const kept = { run: context.run || "", shown: context.query.shown, ...query };
  const used = Object.entries(kept).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  return `#/${view}${used.length ? `?${new URLSearchParams(used)}` : ""}`;
}

// The address of a view as it was left: with its filters, if it is of the same run.
function linkBack(view) {
  const last = lastQuery[view];
  return last?.run === context.run ? link(view, { ...last.query, shown: context.query.shown }) : link(view);
}

function go(view, query = {}, { replace = false } = {}) {
  if (replace && view !== context.view) return;  // a slow answer came after its view was left
  const target = link(view, query);
  if (!replace) { location.hash = target; return; }
  history.replaceState(null, "", target);
  const before = context.run;
  readAddress();
  if (context.run !== before) drawHeader();
}

function drawHeader() {
  const isOnTheme = document.activeElement?.id === "theme";  // the button itself is put into the new header
  fill(document.getElementById("top"), header());
  if (isOnTheme) document.getElementById("theme").focus();
  document.title = `${context.runs[context.run].name} · rlpipe view`;
}

function header() {
  const run = context.runs[context.run];
  const tabs = TABS.map(([view, title]) => {
    const here = context.view === view || (view === "groups" && context.view === "group");
    return make("a", { href: context.view === view ? link(view) : linkBack(view), "aria-current": here ? "page" : null }, title);
  });
  const several = context.runs.length > 1;
  const chooser = several && labelled("Run", choose("run", context.runs.map(({ name }, place) => [String(place), name]), String(context.run),
    (event) => go(context.view === "group" ? "groups" : context.view, { run: event.target.value })));
  const toggle = document.getElementById("theme") ?? themeButton(() => current?.redraw?.());
  return [
    make("a", { class: "brand", href: link("overview") }, make("b", {}, "rlpipe"), " view"),
    make("nav", { "aria-label": "Views" }, tabs),
    make("div", { class: "which" }, chooser || make("span", { class: "run-name", title: run.path }, run.name),
      pill(run.state, STATE_KINDS[run.state] ?? ""), make("span", { class: "muted" }, progress(run)), toggle),
  ];
}

function progress(run) {
  return run.num_steps ? `step ${count(run.step)} of ${count(run.num_steps)}` : `step ${count(run.step)}`;
}

async function show(event) {
  context.cameFrom = context.view;
  readAddress();
  hideTooltip();
  drawHeader();
  current?.close?.();
  current = problem = null;
  const { hash } = location;
  const before = scrolled.get(hash) ?? 0;
  if (event) scrollTo(0, 0);
  await draw();
  if (!event || hash !== location.hash) return;
  if (before) scrollTo(0, before);
  if (document.activeElement === document.body) document.getElementById("main").focus({ preventScroll: true });
}

async function draw() {
  const own = ++generation;
  drawing = true;
  const main = document.getElementById("main");
  const body = make("div", { class: `view ${context.view}` });
  try {
    const made = await VIEWS[context.view](body, context);
    if (own !== generation) { made?.close?.(); return; }
    current = made;
    if (problem === null) fill(main, exported && exportNotice(), body);
    else main.append(body);  // a screen reader would say the problem again if it were drawn again
    await current?.shown?.();
    if (own !== generation) return;
    if (problem !== null) fill(main, exported && exportNotice(), body);
    problem = null;
    main.dataset.view = context.view;
  } catch (error) {
    if (own !== generation) return;
    current?.close?.();
    current = null;
    body.remove();
    if (error.message === problem) return;
    problem = error.message;
    fill(main, exported && exportNotice(), notice(problem, "bad"));
    main.dataset.view = `${context.view} failed`;
  } finally {
    if (own === generation) drawing = false;
  }
}

function exportNotice() {
  return make("details", { class: "notice", id: "left-out" }, make("summary", {}, exported.title),
    make("ul", {}, exported.left_out.map((line) => make("li", {}, line))));
}

let failures = 0;
let stale = false;  // what changed while the page was hidden is drawn when it is seen again

async function poll() {
  let runs;
  try {
    runs = await ask("runs");
  } catch {
    failures += 1;
    if (failures === 2) document.body.prepend(make("p", { class: "notice bad", id: "gone", role: "alert" }, "rlpipe view has ended, or can't be reached: what is shown may be old"));
    return;
  }
  stale ||= failures > 0;  // what was asked for meanwhile has not come
  failures = 0;
  document.getElementById("gone")?.remove();
  const before = context.runs;
  context.runs = runs;
  if (runs.length !== before.length) readAddress();  // a run has begun in a folder that is viewed
  const changed = runs.some((run, place) => run.revision !== before[place]?.revision || run.num_indexed !== before[place]?.num_indexed || run.state !== before[place]?.state || run.problem !== before[place]?.problem);
  stale ||= changed;
  if (!stale || document.hidden) return;
  if (!document.activeElement?.closest("#top select")) drawHeader();
  if (drawing || refreshing || isReading()) return;
  stale = false;
  refreshing = true;  // a server that is slower than this clock gets one question at a time
  try {
    await refresh();
  } finally {
    refreshing = false;
  }
}

// Whether somebody has selected text, which a new drawing would take away.
function isReading() {
  const selection = getSelection();
  return !selection.isCollapsed && document.getElementById("main").contains(selection.anchorNode);
}

// Draws what has changed, or the whole view if that could not be drawn before, as that of a run without a ledger yet.
async function refresh() {
  if (problem !== null) { await draw(); return; }
  const own = generation;
  let message = null;
  try {
    await current?.update?.();
  } catch (error) {
    stale = true;  // it is tried again
    message = `what is shown may be old: ${error.message}`;
  }
  if (own !== generation) return;
  const shown = document.getElementById("old");
  if (shown?.textContent === message) return;
  shown?.remove();
  if (message) document.getElementById("main").prepend(make("p", { class: "notice bad", id: "old", role: "alert" }, message));
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, textarea, select");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); search.select(); }
  } else if (event.key === "Escape" && typing) event.target.blur();
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("main").focus(); });

context.runs = await ask("runs");
addEventListener("scroll", () => scrolled.set(location.hash, scrollY), { passive: true });
addEventListener("hashchange", show);  // before, there is no run to show
await show();
if (!exported) setInterval(poll, POLL_MS);
