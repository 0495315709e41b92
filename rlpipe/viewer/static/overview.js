// The overview: each run's state, its curves, with events above them, and what the doctor says.

import { Chart } from "./charts.js";
import { fill, labelled, make, notice, pill } from "./dom.js";
import { count, moment, number, span, STATE_KINDS } from "./format.js";
import { ask } from "./source.js";
import { keep, recall } from "./storage.js";

const CHARTS = [
  ["Reward", ["reward"]], ["Held-out accuracy", ["eval/accuracy"]], ["Held-out loss", ["eval/loss"]], ["Loss", ["loss"]],
  ["Entropy", ["entropy"]], ["KL", ["kl"]], ["Completion length", ["completions/mean_length"]], ["Truncated share", ["completions/clipped_ratio"]],
  ["Staleness", ["staleness/mean"]], ["Tokens per second", ["tokens_per_second"]], ["Seconds per step", ["time/step"]],
  ["Groups discarded so far", ["groups/discarded", "groups/failed"]], ["Gradient norm", ["grad_norm"]], ["Log-prob difference of engine and learner", ["sampling/logp_difference/mean"]],
];
const OVERLAPPING = "phases of an asynchronous run overlap";
export const MAX_OVERLAID = 8;
const SMOOTHING = "rlpipe-smoothing";

function isPhase(name) {
  return name.startsWith("time/") && name !== "time/step";
}

function isRewardMean(name) {
  return name.startsWith("rewards/") && name.endsWith("/mean");
}

export async function overviewView(body, context) {
  const state = { charts: new Map(), smoothing: Number(recall(SMOOTHING)) || 0, more: (context.query.more ?? "").split(",").filter(Boolean) };
  const strip = make("div", { class: "strip" });
  const grid = make("div", { class: "charts" });
  const empty = notice("");
  const health = make("section", { class: "card doctor", "aria-label": "Doctor" }, make("h3", {}, "Doctor"), make("p", { class: "muted" }, "…"));
  const names = new Set();
  const datalist = make("datalist", { id: "metric-names" });
  const search = make("input", { type: "search", list: "metric-names", placeholder: "any other metric (press /)", "aria-label": "Add a chart of a metric", onchange: () => addMetric() });
  const slider = make("input", { type: "range", min: "0", max: "0.99", step: "0.01", name: "smoothing", oninput: () => {
    state.smoothing = Number(slider.value);
    keep(SMOOTHING, slider.value);
    draw();
  } });
  slider.value = String(state.smoothing);
  const reset = make("button", { onclick: () => zoomTo() }, "Reset zoom");
  const toolbar = make("div", { class: "toolbar" }, labelled("Smoothing", slider), search, datalist, reset,
    make("span", { class: "muted" }, "drag over a chart to zoom all of them, double click to go back; keys: arrows, e, Enter, +, -, 0"));
  fill(body, strip, toolbar, grid, health);
  let data = [];
  let marks = [];

  function zoomTo(range) {
    state.charts.forEach((chart) => chart.zoomTo(range));
  }

  function addMetric() {
    const name = search.value.trim();
    if (!names.has(name)) return;
    search.value = "";
    if (!state.more.includes(name)) state.more.push(name);
    context.go("overview", { more: state.more.join(",") }, { replace: true });
    update();
  }

  async function update() {
    const shown = context.shown;
    const marked = context.ask("marks").catch(() => []);  // a run without a ledger has no events
    const listed = await Promise.all(shown.map((run) => ask("names", { run })));
    listed.flat().forEach((name) => names.add(name));
    if (datalist.childElementCount !== names.size) fill(datalist, [...names].sort().map((name) => make("option", { value: name })));
    const wanted = [...new Set([...CHARTS.flatMap(([, metrics]) => metrics), "staleness/max", ...state.more, ...[...names].filter((name) => isPhase(name) || isRewardMean(name))])];
    const found = await Promise.all(shown.map((run) => ask("series", { run, name: wanted.filter((name) => names.has(name)) })));
    const events = await marked;
    if (shown !== context.shown) return;  // others were chosen meanwhile
    [data, marks] = [found, events];
    draw();
    const hidden = context.runs.map((_, run) => run).filter((run) => !shown.includes(run));
    fill(strip, shown.map((run) => runCard(context, run, showRuns)), hidden.length > 0 && make("div", { class: "card others" },
      "not shown:", hidden.map((run) => make("label", {}, showBox(context, run, showRuns), context.runs[run].name))));
    showHealth();
  }

  // The view's own run is one of those that are shown.
  async function showRuns(runs) {
    const run = runs.includes(context.run) ? context.run : runs[0];
    context.go("overview", { run: run || "", shown: runs.join(","), more: state.more.join(",") }, { replace: true });
    await update();
  }

  function linesOf(metrics) {
    return context.shown.flatMap((run, at) => metrics.filter((name) => data[at]?.[name]?.values.some((value) => value !== null)).map((name, place) => ({
      label: [context.runs.length > 1 ? context.runs[run].name : "", metrics.length > 1 || context.runs.length === 1 ? shortName(name) : ""].filter(Boolean).join(" · "),
      ...data[at][name], place: metrics.length > 1 && context.shown.length === 1 ? place : run,
      dash: context.shown.length > 1 && place > 0 ? [3 * place + 1, 4] : undefined,
    })));
  }

  function draw() {
    const charts = [...CHARTS];
    const means = [...names].filter(isRewardMean);
    if (means.length > 1) charts.splice(1, 0, ["Reward by function", means]);
    const specs = charts.map(([title, metrics]) => [title, linesOf(metrics), {}]);
    specs.push(["Time by phase (s)", phaseLines(), { stacked: true, note: context.shown.length > 1 ? `${context.runs[context.run].name}; ${OVERLAPPING}` : OVERLAPPING }]);
    specs.push(...state.more.map((name) => [name, linesOf([name]), { added: true }]));
    const used = specs.filter(([title, lines, options]) => lines.length || options.added);
    const owned = context.shown.length > 1 ? marks.map((mark) => ({ ...mark, run: context.runs[context.run].name })) : marks;
    const options = { smoothing: state.smoothing, marks: owned, onmark: (mark) => context.go("events", { event: mark.id }), onzoom: zoomTo };
    const elements = [];
    for (const [title, lines, how] of used) {
      if (!state.charts.has(title)) state.charts.set(title, new Chart(title, { stacked: how.stacked, note: how.note }));
      elements.push([state.charts.get(title), lines]);
    }
    empty.textContent = whyEmpty(context.shown.map((run) => context.runs[run].state));
    const wanted = elements.length ? elements.map(([chart]) => chart.element) : [empty];
    if (grid.children.length !== wanted.length || wanted.some((element, place) => element !== grid.children[place])) fill(grid, wanted);
    for (const [chart, lines] of elements) chart.update(lines, options);
    grid.dataset.points = String(Math.max(0, ...elements.map(([chart]) => chart.plot.data[0].length)));
  }

  function phaseLines() {
    const at = Math.max(context.shown.indexOf(context.run), 0);
    const found = data[at] ?? {};
    return Object.keys(found).filter(isPhase).sort().map((name, place) => ({ label: name.slice(5), ...found[name], place }));
  }

  async function showHealth() {
    try {
      const lines = await context.ask("diagnosis");
      fill(health, make("h3", {}, "Doctor", make("small", {}, "what `rlpipe doctor` says about this run")), lines.map((line) => make("div", { class: "finding" },
        pill(line.status, STATE_KINDS[line.status] ?? ""), make("b", {}, line.subject), make("span", {}, line.text, line.fix && make("em", {}, ` ${line.fix}`)))));
    } catch (error) { fill(health, make("h3", {}, "Doctor"), notice(error.message)); }
  }

  return { shown: update, update, redraw: draw, close: () => state.charts.forEach((chart) => chart.destroy()) };
}

function whyEmpty(states) {
  if (states.some((state) => ["running", "silent"].includes(state))) return "no metrics yet: the first step is under way";
  return `no metrics: no step was done before the end (${[...new Set(states)].join(", ")})`;
}

function shortName(name) {
  return isRewardMean(name) ? name.slice(8, -5) : name;
}

function showBox(context, place, show) {
  const { shown } = context;
  const isShown = shown.includes(place);
  const runs = isShown ? shown.filter((other) => other !== place) : [...shown, place].sort((one, other) => one - other);
  return make("input", { type: "checkbox", "aria-label": `Show ${context.runs[place].name}`, checked: isShown, disabled: runs.length === 0, onchange: () => show(runs) });
}

// As many runs as are shown at first, with one of them.
function firstRuns(context, place) {
  const others = context.runs.map((_, other) => other).filter((other) => other !== place).slice(0, MAX_OVERLAID - 1);
  return [...others, place].sort((one, other) => one - other);
}

function runCard(context, place, show) {
  const run = context.runs[place];
  const share = run.num_steps ? Math.min(run.step / run.num_steps, 1) : 0;
  const lasted = run.began_at === null ? null : (run.ended_at ?? Date.now() / 1000) - run.began_at;
  const facts = [["reward", number(run.reward)], ["held-out", number(run.accuracy)], ["tokens/s", count(run.tokens_per_second)], ["groups", count(run.num_groups)], ["began", moment(run.began_at)], ["lasts", span(lasted)]];
  const isAlone = context.shown.length === 1;
  const choices = context.runs.length > 1 && [
    make("button", { class: "quiet", "data-key": `only ${place}`, "aria-label": isAlone ? "Show all runs" : `Show only ${run.name}`, onclick: () => show(isAlone ? firstRuns(context, place) : [place]) }, isAlone ? "all runs" : "only this"),
    showBox(context, place, show)];
  return make("section", { class: "card run", "aria-label": run.name },
    make("div", { class: "line" }, make("i", { class: `dot series-${place % 8}` }), make("b", { title: run.path }, run.name), pill(run.state, STATE_KINDS[run.state] ?? ""), choices),
    make("progress", { value: share, max: 1, "aria-label": "steps done" }),
    make("div", { class: "facts" }, make("div", {}, make("span", {}, "step"), make("b", {}, run.num_steps ? `${count(run.step)} / ${count(run.num_steps)}` : count(run.step))),
      facts.map(([name, text]) => make("div", {}, make("span", {}, name), make("b", {}, text)))),
    run.error && notice(run.error, "bad"), run.problem && notice(run.problem, "bad"));
}
