// What two runs, or two versions of one run's policy, wrote to the same prompt.

import { choose, fill, headings, labelled, make, notice, pill } from "./dom.js";
import { count, number, NONE, STATE_KINDS } from "./format.js";
import { promptCard, rolloutCard } from "./group.js";
import { ask } from "./source.js";

const SIDES = ["left", "right"];
const KINDS = [["held_out", "held out"], ["training", "training"]];

export async function compareView(body, context) {
  const other = context.runs.length > 1 && context.run === 0 ? 1 : 0;
  const hasHeldOut = [context.run, other].every((place) => context.runs[place].has_evaluations);
  let prompts = [];
  const isAsked = ["text", "key", "prompts"].some((name) => context.query[name]);
  const query = { left: String(context.run), right: String(other), prompts: hasHeldOut && !isAsked ? "held_out" : "training", ...context.query };
  let loads = 0;
  let asked = 0;
  const list = make("div", { class: "card table" });
  const pair = make("div", { class: "pair" });
  let offered = context.runs.length;
  let form = controls();
  fill(body, form, list, pair);

  function controls() {
    const runs = context.runs.map(({ name }, place) => [String(place), name]);
    const bound = (name, text) => make("input", { name, inputmode: "numeric", size: 5, placeholder: text, value: query[name] ?? "", "aria-label": name.replace("_", " version ") });
    const side = (name, title) => make("fieldset", {}, make("legend", {}, title), context.runs.length > 1 && choose(name, runs, query[name]), labelled("versions", bound(`${name}_min`, "from")), bound(`${name}_max`, "to"));
    const made = make("form", { class: "filters card", role: "search", onsubmit: (event) => { event.preventDefault(); apply(); }, onchange: () => apply() },
      make("input", { type: "search", name: "text", value: query.text ?? "", placeholder: "search prompts (press /)", "aria-label": "Search prompts" }), 
      labelled("prompts", choose("prompts", KINDS, query.prompts)), side("left", "Left"), side("right", "Right"), make("button", { type: "submit" }, "Compare"));
    function apply() {
      for (const [name, value] of new FormData(made)) query[name] = value;
      delete query.key;
      remember();
      load();
    }
    return made;
  }

  // A run that begins later is offered, too, once nobody is choosing.
  function offerRuns() {
    if (context.runs.length === offered || form.contains(document.activeElement)) return;
    offered = context.runs.length;
    const before = form;
    form = controls();
    before.replaceWith(form);
  }

  function remember() {
    const { run, shown, ...own } = query;
    context.go("compare", own, { replace: true });
  }

  function parameters() {
    return Object.fromEntries(["text", "prompts", ...SIDES.flatMap((side) => [side, `${side}_min`, `${side}_max`])].map((name) => [name, query[name]]));
  }

  // Enter in a field both changes and submits the form: of two answers that are under way, the later one counts.
  async function load() {
    const own = ++loads;
    asked += 1;
    fill(pair);
    try {
      const found = await findPrompts(own);
      if (own !== loads) return;
      prompts = found;
      drawList();
      const key = query.key ?? prompts[0]?.key;
      if (key !== undefined) await showPair(key);
    } catch (error) {
      if (own !== loads) return;
      prompts = null;
      fill(list, notice(error.message, "bad"));
    }
  }

  async function findPrompts(own) {
    const found = await ask("prompts", parameters());
    if (own !== loads || found.length || !hasHeldOut || isAsked || query.prompts !== "held_out" || unread()) return found;
    query.prompts = body.querySelector("select[name=prompts]").value = "training"; // one evaluation so far, or other prompts
    return ask("prompts", parameters());
  }

  // The run of a side whose groups are still being read.
  function unread() {
    return SIDES.map((side) => context.runs[query[side]]).find((run) => run && run.num_indexed < run.num_groups);
  }

  function whyEmpty() {
    const run = unread();
    if (run) return `the prompts of ${run.name} are being read: ${count(run.num_indexed)} of ${count(run.num_groups)} groups so far`;
    if (query.prompts === "held_out") return "no held-out prompt that both sides have answered; a run logs them at each evaluation, if it has data.held_out and tracking.log_completions above 0";
    return "no training prompt that both sides have answered; a prompt comes again in the next epoch, or in a run over the same data";
  }

  function drawList() {
    if (!prompts.length) { fill(list, notice(whyEmpty())); return; }
    const head = ["Prompt", "Left reward", "Right reward", "Change", "Left versions", "Right versions"];
    const rows = prompts.map((prompt) => make("tr", { tabindex: "0", "data-key": prompt.key, onclick: () => showPair(prompt.key), onkeydown: (event) => { if (event.key === "Enter") showPair(prompt.key); else step(event); } },
      make("td", {}, make("span", { class: "prompt" }, prompt.prompt)), make("td", { class: "number" }, number(prompt.left.reward)), make("td", { class: "number" }, number(prompt.right.reward)), make("td", { class: "number" }, change(prompt)), make("td", {}, versions(prompt.left)), make("td", {}, versions(prompt.right))));
    const focused = document.activeElement?.closest?.("tr[data-key]")?.dataset.key;
    fill(list, make("table", { class: "prompts" }, headings(head, head.slice(1, 4)), make("tbody", {}, rows)));
    if (focused !== undefined) list.querySelector(`tr[data-key="${CSS.escape(focused)}"]`)?.focus();
    markChosen();
  }

  function markChosen() {
    list.querySelectorAll("tr").forEach((row) => row.classList.toggle("chosen", row.dataset.key === query.key));
  }

  // The list follows a run that goes on; the answers stay until others are chosen, as somebody may be reading them.
  async function update() {
    offerRuns();
    const own = loads;
    let found;
    try {
      found = await findPrompts(own);
    } catch (error) {
      if (prompts) throw error;
      return;  // it is shown already
    }
    if (own !== loads || (found.length && JSON.stringify(found) === JSON.stringify(prompts))) return;
    const isFirst = !prompts?.length;
    prompts = found;
    drawList();
    if (isFirst && prompts.length) await showPair(query.key ?? prompts[0].key);
  }

  function step(event) {
    const next = { ArrowDown: event.currentTarget.nextElementSibling, ArrowUp: event.currentTarget.previousElementSibling }[event.key];
    if (next) { next.focus(); event.preventDefault(); }
  }

  async function showPair(key) {
    const own = ++asked;
    query.key = key;
    remember();
    markChosen();
    let answers;
    try {
      answers = await ask("answers", { ...parameters(), key });
    } catch (error) {
      if (own === asked) fill(pair, notice(error.message, "bad"));
      return;
    }
    if (own !== asked) return;
    const chosen = { left: answers.left[answers.left.length - 1], right: answers.right[0] };
    if (query.left !== query.right) [chosen.left] = answers.left;
    const columns = SIDES.map((side) => make("div", { class: "side", "data-side": side }));
    fill(pair, columns);
    await Promise.all(SIDES.map((side, place) => showSide(columns[place], side, answers[side], chosen[side])));
  }

  async function showSide(column, side, groups, chosen) {
    if (!chosen) { fill(column, notice("no group")); return; }
    const run = Number(query[side]) || 0;
    const select = choose(`${side}-group`, groups.map((group) => [String(group.group_id), title(group)]), String(chosen.group_id),
      (event) => showSide(column, side, groups, groups.find((group) => String(group.group_id) === event.target.value)));
    column.dataset.group = chosen.group_id;
    let group;
    try {
      group = await ask("group", { run, id: chosen.group_id });
    } catch (error) {
      if (column.dataset.group === String(chosen.group_id)) fill(column, labelled("written by", select), notice(error.message, "bad"));
      return;
    }
    if (column.dataset.group !== String(chosen.group_id)) return;
    fill(column, make("div", { class: "toolbar" }, make("b", {}, context.runs[run].name), labelled("written by", select), make("span", {}, "reward ", make("b", {}, number(group.reward))), pill(group.state.toLowerCase(), STATE_KINDS[group.state] ?? "")),
      promptCard(group, run), group.why_no_tokens && notice(group.why_no_tokens), (group.rollouts ?? []).map((rollout) => rolloutCard(rollout, { how: "logprob", scales: {}, more: () => context.go("group", { id: group.group_id, run }) })));
  }

  await load();
  return { update };
}

function change({ left, right }) {
  if (left.reward === null || right.reward === null) return NONE;
  const value = right.reward - left.reward;
  return make("b", { class: value > 0 ? "plus" : value < 0 ? "minus" : "" }, `${value > 0 ? "+" : ""}${number(value)}`);
}

function title({ version, step, group_id: id }) {
  return `version ${count(version)}${id < 0 ? "" : ` · step ${count(step)} · group ${count(id)}`}`;
}

function versions({ number: groups, oldest, newest }) {
  return `${oldest === newest ? count(oldest) : `${count(oldest)}–${count(newest)}`} (${count(groups)} ${groups === 1 ? "group" : "groups"})`;
}
