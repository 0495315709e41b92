// Where the views get their data: from the server, or, in an exported page, from what the page holds.

const embedded = document.getElementById("exported");
export const exported = embedded ? JSON.parse(embedded.textContent) : null;

export function address(name, query) {
  const pairs = Object.entries(query).flatMap(([key, value]) => [value].flat().map((one) => [key, one]));
  const used = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  used.sort((one, other) => (one[0] < other[0] ? -1 : one[0] > other[0] ? 1 : 0));
  return `api/${name}?${new URLSearchParams(used.map(([key, value]) => [key, String(value)]))}`;
}

export async function ask(name, query = {}) {
  if (exported) return fromExport(name, query);
  const response = await fetch(address(name, query));
  if (!response.ok) throw new Error((await response.text()).trim());
  return response.json();
}

export function imageAddress(run, group, index) {
  if (exported) return exported.runs[run].images[`${group}/${index}`] ?? null;
  return address("image", { run, id: group, number: index });
}

function fromExport(name, query) {
  if (name === "runs") return exported.runs.map((run) => run.summary);
  const run = exported.runs[query.run ?? 0];
  if (name === "series") return Object.fromEntries([query.name].flat().flatMap((key) => key in run.series ? [[key, run.series[key]]] : []));
  if (name === "names") return Object.keys(run.series).sort();
  if (name === "groups") return selectGroups(run, query);
  if (name === "count") return selectGroups(run, query).count;
  if (name === "choices") return rowsOf(run) && run.choices;
  if (name === "group") return rowsOf(run) && needed(run.groups[query.id], `group ${query.id} was left out of this file`);
  if (name === "events") return eventsOf(run, query.kind);
  if (name === "prompts") return sharedPrompts(query);
  if (name === "answers") return { left: answersOf(query, "left"), right: answersOf(query, "right") };
  return needed(run[name], `${name} was left out of this file`);
}

function needed(value, problem) {
  if (value === undefined || value === null) throw new Error(problem);
  return value;
}

function whyNone(run) {
  return run.summary.why_no_ledger || "this run has no ledger";
}

function rowsOf(run) {
  return needed(run.rows, whyNone(run));
}

function eventsOf(run, kind) {
  const found = needed(run.events, whyNone(run));
  return { ...found, before: null, events: found.events.filter((event) => !kind || event.kind === kind) };
}

const COLUMNS = {
  id: "group_id", std: "reward_std", best: "best_reward", step: "step", reward: "reward", length: "length",
  staleness: "staleness", version: "version",
};

function valueOf(row, key) {
  if (key === "state") return exported.states.indexOf(row.state);
  if (key === "status") return exported.statuses.reduce((bits, status, place) => bits + (row.statuses?.includes(status) ? 2 ** place : 0), 0);
  return key.startsWith("reward:") ? row.functions?.[key.slice(7)] ?? null : row[COLUMNS[key]];
}

function within(row, key, query, short) {
  const [least, most] = [query[`${short}_min`], query[`${short}_max`]];
  if (!least && !most) return true;
  const value = valueOf(row, key);
  return value !== null && (!least || value >= Number(least)) && (!most || value <= Number(most));
}

function matches(row, query) {
  const bounded = Object.keys(COLUMNS).every((key) => within(row, key, query, key));
  const scored = !query.function || within(row, `reward:${query.function}`, query, "function");
  const text = (query.text ?? "").toLowerCase();
  return bounded && scored && (!query.state || row.state === query.state) && (!query.reason || row.reason === query.reason)
    && (!query.status || row.statuses?.includes(query.status)) && (!text || (row.prompt ?? "").toLowerCase().includes(text));
}

function selectGroups(run, query) {
  const found = rowsOf(run).filter((row) => matches(row, query));
  const [sort, sign] = [query.sort || "id", query.order === "asc" ? 1 : -1];
  const reasons = [...new Set(run.rows.map(({ reason }) => reason).reverse())];  // in the order of their first groups
  const keyOf = (row) => sort !== "reason" ? valueOf(row, sort) : row.reason === null ? null : reasons.indexOf(row.reason);
  found.sort((one, other) => {
    const [a, b] = [keyOf(one), keyOf(other)];
    if (a === null || b === null) return (a === null) - (b === null) || sign * (one.group_id - other.group_id);
    return sign * (a - b || one.group_id - other.group_id);
  });
  const start = Number(query.after || 0);
  const size = Number(query.size || 50);
  const after = found.length > start + size ? String(start + size) : null;
  return { rows: found.slice(start, start + size), after, count: found.length, num_groups: run.rows.length, num_indexed: run.rows.length };
}

function sideRows(query, side) {
  const run = exported.runs[query[side] ?? 0];
  const rows = query.prompts === "held_out" ? rowsOf(run) && run.held_out : rowsOf(run);
  return rows.filter((row) => row.key && within(row, "version", query, side) && row.group_id in run.groups);
}

function summarize(rows) {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  const versions = rows.map((row) => row.version).filter((version) => version !== null);
  const reward = rewards.length ? rewards.reduce((sum, value) => sum + value, 0) / rewards.length : null;
  return { number: rows.length, reward, oldest: Math.min(...versions), newest: Math.max(...versions) };
}

function sharedPrompts(query) {
  const [left, right] = ["left", "right"].map((side) => Map.groupBy(sideRows(query, side), (row) => row.key));
  const same = String(query.left ?? 0) === String(query.right ?? 0) && !query.left_min && !query.left_max && !query.right_min && !query.right_max;
  const text = (query.text ?? "").toLowerCase();
  const found = [];
  for (const [key, rows] of left) {
    if (!right.has(key) || (text && !(rows[0].prompt ?? "").toLowerCase().includes(text))) continue;
    const pair = { key, prompt: rows[0].prompt, left: summarize(rows), right: summarize(right.get(key)) };
    if (!same || pair.left.newest > pair.left.oldest) found.push(pair);
  }
  const change = ({ left: one, right: other }) => Math.abs((other.reward ?? 0) - (one.reward ?? 0));
  return found.sort((one, other) => change(other) - change(one));
}

function answersOf(query, side) {
  return sideRows(query, side).filter((row) => row.key === query.key);
}
