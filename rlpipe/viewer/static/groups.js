// The table of groups: filtered, sorted and paged by the server.

import { choose, fill, labelled, make, notice, pill } from "./dom.js";
import { count, number, NONE, STATE_KINDS } from "./format.js";
import { forget, keep, recall } from "./storage.js";

const RANGES = [["step", "Step"], ["reward", "Reward"], ["length", "Length"], ["version", "Version"], ["staleness", "Staleness"]];
const PAUSE_MS = 50;  // after a key, for further ones
const MAX_COUNTED = 100000;
const LEFT = "rlpipe-groups-left";  // the address and the page that a group was opened from
const CHOICES_EVERY = 5;  // refreshes, in a run of many groups, whose states and reasons take long to count

function columnsFor({ functions, reasons }) {
  const means = functions.length > 1 ? functions : [];
  return [
    ["id", "Group", (row) => count(row.group_id)], ["step", "Step", (row) => count(row.step)],
    ["state", "State", (row) => pill(row.state.toLowerCase(), STATE_KINDS[row.state] ?? "")],
    ...(reasons.length ? [["reason", "Reason", (row) => make("span", { class: "reason", title: row.reason }, row.reason ?? NONE)]] : []),
    [null, "Prompt", (row) => make("span", { class: "prompt" }, row.prompt ?? NONE)],
    ["reward", "Reward", (row) => rewardCell(row.reward)], ["std", "Std", (row) => number(row.reward_std)], ["best", "Best", (row) => number(row.best_reward)],
    ...means.map((name) => [`reward:${name}`, name, (row) => number(row.functions?.[name])]),
    ["length", "Length", (row) => number(row.length)], ["status", "Outcomes", (row) => (row.statuses ?? []).map((status) => pill(status, STATE_KINDS[status] ?? ""))],
    ["version", "Version", (row) => count(row.version)], ["staleness", "Stale", (row) => count(row.staleness)], [null, "Engine", (row) => row.engine ?? NONE],
  ];
}

function readReturn() {
  return JSON.parse(recall(LEFT) ?? "{}");
}

// The address of the table that a group was opened from, if it is one of the same run.
export function addressOfReturn(context) {
  const { address } = readReturn();
  const run = new URLSearchParams(address?.split("?")[1] ?? "").get("run") ?? "";
  return address && Number(run) === context.run ? address : context.link("groups");
}

// The groups of the page that a group was opened from, in its order, if that was filtered or sorted.
export function groupsOfReturn() {
  const { address, ids } = readReturn();
  const chosen = new URLSearchParams(address?.split("?")[1] ?? "");
  ["run", "shown"].forEach((name) => chosen.delete(name));
  return chosen.size && ids ? ids : [];
}

export function forgetReturn() {
  forget(LEFT);
}

function placesOfReturn() {
  const { address, places } = readReturn();
  return address === location.hash ? places : [];
}

function kindOf(key) {
  return [null, "state", "reason", "status"].includes(key) ? "" : "number";
}

function rewardCell(reward) {
  return make("b", { class: reward > 0 ? "plus" : "" }, number(reward));
}

export async function groupsView(body, context) {
  let choices = await context.ask("choices");
  let columns = columnsFor(choices);
  const query = { sort: "id", order: "desc", ...context.query };
  const places = context.cameFrom === "group" ? placesOfReturn() : [];
  let page = null;
  let asked = 0;
  let answered = null;  // the answer to the last question that was sent
  let turning = false;
  let refreshes = 0;
  let drawn = null;  // what the table shows
  const table = make("table", { class: "groups" });
  const status = make("p", { class: "muted", role: "status", "aria-live": "polite" });
  const indexing = make("div", { class: "indexing", hidden: true });
  const unknown = make("p", { class: "notice", hidden: true });
  const older = make("button", { onclick: () => turn(true) }, "Next page");
  const newer = make("button", { onclick: () => turn(false) }, "Previous page");
  let form = filters();
  fill(body, form, indexing, make("div", { class: "pager" }, status, newer, older), unknown, make("div", { class: "card table" }, table));

  function filters() {
    let timer = 0;
    const changed = ({ target }) => { clearTimeout(timer); timer = setTimeout(apply, target.matches("select") ? 0 : PAUSE_MS); };
    const bound = (name) => make("input", { name, inputmode: "decimal", size: 5, value: query[name] ?? "", "aria-label": name.replace("_min", " at least").replace("_max", " at most"), placeholder: name.endsWith("min") ? "min" : "max" });
    const range = (name, title) => make("fieldset", {}, make("legend", {}, title), bound(`${name}_min`), bound(`${name}_max`));
    const any = (values) => [["", "any"], ...values.map((value) => [value, value.length > 60 ? `${value.slice(0, 60)}…` : value])];
    const choosing = (name, values) => choose(name, any(query[name] && !values.includes(query[name]) ? [...values, query[name]] : values), query[name] ?? "");
    const functions = choices.functions.length > 0 && make("fieldset", {}, make("legend", {}, "Reward function"), choosing("function", choices.functions), bound("function_min"), bound("function_max"));
    const made = make("form", { class: "filters card", role: "search", oninput: changed, onsubmit: (event) => { event.preventDefault(); apply(); } },
      make("input", { type: "search", name: "text", value: query.text ?? "", placeholder: "search prompts (press /)", "aria-label": "Search prompts" }),
      RANGES.map(([name, title]) => range(name, title)), functions,
      labelled("State", choosing("state", choices.states)), labelled("Outcome", choosing("status", choices.statuses)),
      choices.reasons.length > 0 && labelled("Reason", choosing("reason", choices.reasons)),
      make("button", { type: "reset", onclick: () => context.go("groups") }, "Clear"));
    function apply() {
      for (const [name, value] of new FormData(made)) query[name] = value;
      places.length = 0;
      remember();
      load();
    }
    return made;
  }

  function remember() {
    const { after, ...kept } = query;
    context.go("groups", { ...kept, sort: kept.sort === "id" ? "" : kept.sort, order: kept.order === "desc" ? "" : kept.order, run: context.run || "" }, { replace: true });
  }

  function sortBy(key) {
    query.order = query.sort === key && query.order === "desc" ? "asc" : "desc";
    query.sort = key;
    places.length = 0;
    remember();
    load();
  }

  function turn(forwards) {
    if (turning) return;  // a key that is held would take the same place again
    turning = true;
    if (forwards) places.push(page.after);
    else places.pop();
    load();
  }

  async function load() {
    const own = ++asked;
    await answered?.catch(() => {});  // a server that is slower than a hand gets only the last of many questions
    if (own !== asked) return;
    try {
      answered = context.ask("groups", { ...query, after: places[places.length - 1] });
      const found = await answered;
      if (own !== asked) return;
      page = found;
      turning = false;
      draw();
      const matches = await context.ask("count", query);
      if (own !== asked) return;
      const many = matches >= MAX_COUNTED && matches < page.num_groups ? "over " : "";
      status.textContent = `${many}${count(matches)} of ${count(page.num_groups)} groups${places.length ? `, page ${places.length + 1}` : ""}`;
    } catch (error) {
      if (own !== asked) return;
      turning = false;
      drawn = null;
      fill(table, make("tbody", {}, make("tr", {}, make("td", {}, notice(error.message, "bad")))));
    }
  }

  // Rows that are drawn anew take away what is under the pointer.
  function draw() {
    const wanted = JSON.stringify([page, query, places.length, columns.map(([key]) => key)]);
    table.dataset.asked = String(asked);
    drawNotes();
    if (wanted === drawn) return;
    drawn = wanted;
    const wasInRow = table.contains(document.activeElement) && document.activeElement.matches("tr");
    const head = columns.map(([key, title]) => {
      const order = query.sort === key ? (query.order === "desc" ? "descending" : "ascending") : "none";
      return make("th", { scope: "col", "aria-sort": key ? order : null, class: kindOf(key) },
        key ? make("button", { onclick: () => sortBy(key), "data-key": key }, title, make("i", { "aria-hidden": "true" }, order === "none" ? "" : order === "descending" ? " ↓" : " ↑")) : title);
    });
    const rows = page.rows.map((row, place) => make("tr", { tabindex: place === 0 ? "0" : "-1", "data-group": row.group_id, onclick: () => getSelection().toString() || open(row.group_id), onkeydown: move, onfocus: hold, "aria-label": `group ${row.group_id}` },
      columns.map(([key, , cell]) => make("td", { class: kindOf(key) }, cell(row)))));
    const empty = make("tr", {}, make("td", { colspan: columns.length }, notice("no group matches")));
    fill(table, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows.length ? rows : empty));
    if (wasInRow && !table.contains(document.activeElement)) rows[0]?.focus();  // another page has other rows
    older.disabled = page.after === null;
    newer.disabled = places.length === 0;
  }

  function drawNotes() {
    indexing.hidden = page.num_indexed >= page.num_groups;
    if (!indexing.hidden) fill(indexing, make("progress", { value: page.num_indexed, max: page.num_groups }), `rewards by function, outcomes and prompts are known of the first ${count(page.num_indexed)} of ${count(page.num_groups)} groups; the rest is being read`);
    const needsRecords = query.text || query.status || query.function || query.sort === "status" || query.sort.startsWith("reward:");
    const isKnown = page.num_known === null || page.num_known === undefined || page.num_known >= page.num_groups;
    unknown.hidden = !indexing.hidden || isKnown || !needsRecords;
    unknown.textContent = unknown.hidden ? "" : `prompts, outcomes and rewards by function are known of ${count(page.num_known)} of ${count(page.num_groups)} groups: those of the others went with their tokens (ledger.keep_steps)`;
  }

  function open(id) {
    keep(LEFT, JSON.stringify({ address: location.hash, places, ids: page.rows.map((row) => row.group_id) }));
    context.go("group", { id });
  }

  // Tab goes back to the row that was focused last.
  function hold(event) {
    table.querySelectorAll("tbody tr").forEach((row) => { row.tabIndex = row === event.currentTarget ? 0 : -1; });
  }

  function move(event) {
    const row = event.currentTarget;
    const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling, Home: row.parentElement.firstElementChild, End: row.parentElement.lastElementChild }[event.key];
    if (event.key === "Enter") open(row.dataset.group);
    else if (next) { next.focus(); event.preventDefault(); }
    else if (event.key === "ArrowRight" && !older.disabled) turn(true);
    else if (event.key === "ArrowLeft" && !newer.disabled) turn(false);
  }

  // A run gets new states and reasons, and its reward functions, while the table is seen already: they are offered
  // once nobody is choosing.
  async function update() {
    const isDue = !choices.functions.length || page === null || page.num_groups < MAX_COUNTED || refreshes++ % CHOICES_EVERY === 0;
    const found = isDue ? await context.ask("choices") : choices;
    if (JSON.stringify(found) !== JSON.stringify(choices) && !form.contains(document.activeElement)) {
      [choices, columns] = [found, columnsFor(found)];
      const before = form;
      form = filters();
      before.replaceWith(form);
    }
    await load();
  }

  await load();
  return { update };
}
