// One group: its prompt, and the completions of it side by side.

import { choose, fill, labelled, make, notice, pill } from "./dom.js";
import { episodeTree, messageNodes } from "./episode.js";
import { count, moment, number, NONE, STATE_KINDS } from "./format.js";
import { addressOfReturn, forgetReturn, groupsOfReturn } from "./groups.js";
import { exported, imageAddress } from "./source.js";
import { keep, recall } from "./storage.js";
import { COLOURINGS, legendOf, scalesOf, tokenText } from "./tokens.js";

const COLOURING = "rlpipe-colouring";
const FIRST_TOKENS = 2000;
const FINAL = ["TRAINED", "DISCARDED", "HELD OUT"];  // states of groups that change no more

export async function groupView(body, context) {
  if (!["groups", "group"].includes(context.cameFrom)) forgetReturn();
  const id = Number(context.query.id) || 0;
  let group = null;
  let problem = "";
  const toolbar = make("div", { class: "toolbar" });
  const cards = make("div", { class: "siblings" });
  const legend = make("div", { class: "legend" });
  const how = () => recall(COLOURING) ?? "logprob";
  const select = choose("colouring", COLOURINGS, how(), (event) => { keep(COLOURING, event.target.value); draw(); });
  let tokens = FIRST_TOKENS;
  let isFinal = false;

  // Without the group, the toolbar still leads to others; the group may be admitted later.
  async function read() {
    try {
      const before = group?.state;
      group = await context.ask("group", { id, tokens });
      isFinal = FINAL.includes(group.state) && before === group.state;
    } catch (error) {
      if (group) throw error;
      problem = error.message;
    }
  }

  function draw() {
    if (!group) return;
    fill(cards, (group.rollouts ?? []).map((rollout) => rolloutCard(rollout, { how: how(), scales: scalesOf(group), more: readMore })));
    fill(legend, hasTokens() && legendOf(how(), group));
  }

  function hasTokens() {
    return group.rollouts?.some((rollout) => rollout.sequences.length) ?? false;
  }

  // The browser would take minutes for all tokens of a group of long completions at once.
  async function readMore() {
    tokens *= 4;
    await read();
    draw();
  }

  // A group that is sampled, scored or trained while it is shown.
  async function update() {
    if (isFinal) { drawToolbar(); return; }
    const before = JSON.stringify([group, problem]);
    await read();
    if (JSON.stringify([group, problem]) === before) drawToolbar();  // the next group may be there now
    else drawAll();
  }

  function drawToolbar() {
    fill(toolbar, make("a", { class: "button", href: addressOfReturn(context) }, "← Groups"), linkTo(-1, "Previous group", "‹"), make("h2", {}, `Group ${count(id)}`), linkTo(1, "Next group", "›"),
      group && [pill(group.state.toLowerCase(), STATE_KINDS[group.state] ?? ""),
        group.messages.length > 0 && make("a", { class: "button", href: context.link("compare", { text: lastText(group).slice(0, 80) }) }, "Compare this prompt")]);
  }

  function linkTo(by, name, text) {
    const next = nearestGroup(context, id, by);
    const used = next === null ? { "aria-disabled": "true", role: "link" } : { href: context.link("group", { id: next }) };
    return make("a", { class: "button", "aria-label": name, ...used }, text);
  }

  function drawAll() {
    drawToolbar();
    fill(body, toolbar, group ? content() : notice(problem, "bad"));
    draw();
  }

  function content() {
    return [facts(group), group.reason && notice(`discarded: ${group.reason}`), group.why_no_tokens && notice(group.why_no_tokens),
      group.tokenizer_problem && notice(`tokens are shown as numbers: ${group.tokenizer_problem}`),
      promptCard(group, context.run),
      hasTokens() && make("div", { class: "toolbar" }, labelled("Colour tokens by", select), legend), cards];
  }

  await read();
  drawAll();
  return { redraw: draw, update };
}

// The id of the group before (-1) or after (1) another one, in the table that it was opened from if that was filtered or
// sorted, or else by number; null if there is none.
function nearestGroup(context, id, by) {
  if (id < 0) return null;  // an answer to a held-out prompt
  const listed = groupsOfReturn();
  if (listed.includes(id)) return listed[listed.indexOf(id) + by] ?? null;
  if (exported) {
    const others = Object.keys(exported.runs[context.run].groups).map(Number).filter((other) => other >= 0 && (other - id) * by > 0);
    return others.length ? others.reduce((one, other) => (other - one) * by < 0 ? other : one) : null;
  }
  const last = context.runs[context.run].num_groups - 1;
  const next = by < 0 ? Math.min(id - 1, last) : id + 1;
  return next >= 0 && next <= last ? next : null;
}

function lastText(group) {
  return group.messages[group.messages.length - 1].text.split("\n")[0];
}

function facts(group) {
  const items = [["step", count(group.step)], ["reward", number(group.reward)], ["std", number(group.reward_std)], ["best", number(group.best_reward)], ["staleness", count(group.staleness)], ["row of the data", count(group.prompt_id)],
    ["epoch", count(group.epoch)], ["engine", group.engine ?? NONE], ["generated in", group.generate_s === null ? NONE : `${number(group.generate_s)} s`], ["scored in", group.score_s === null ? NONE : `${number(group.score_s)} s`], ["admitted", moment(group.admitted_at)],
    ["trained again in step", group.replayed_in], ...Object.entries(group.logged ?? {}).map(([name, value]) => [name, number(value)])];
  return make("div", { class: "facts card" }, items.filter(([, text]) => text !== null && text !== undefined && text !== NONE).map(([name, text]) => make("div", {}, make("span", {}, name), make("b", {}, text))));
}

export function promptCard(group, run) {
  const images = Array.from({ length: group.num_images ?? 0 }, (_, index) => imageAddress(run, group.group_id, index)).map((source, index) =>
    source ? make("img", { src: source, alt: `image ${index + 1} of the prompt`, loading: "lazy" }) : make("span", { class: "muted" }, "image left out"));
  return make("section", { class: "card prompt-card", "aria-label": "Prompt" }, make("h3", {}, "Prompt"),
    group.messages.length ? messageNodes(group.messages) : notice("it is not kept any more"), images.length > 0 && make("div", { class: "images" }, images));
}

export function rolloutCard(rollout, { how, scales, more }) {
  const rewards = Object.entries(rollout.rewards ?? {});
  const versions = Object.entries(rollout.versions).map(([version, tokens]) => `${count(tokens)} of version ${version}`).join(", ");
  const sign = rollout.advantage > 0 ? "plus" : rollout.advantage < 0 ? "minus" : "";
  const texts = rollout.sequences.map((sequence, place) => [
    rollout.sequences.length > 1 && make("small", { class: "muted" }, `sequence ${place + 1} of ${rollout.sequences.length}`), tokenText(sequence, how, scales),
    sequence.num_left > 0 && (exported ? make("small", { class: "muted" }, `${count(sequence.num_left)} more tokens were left out of this file`) : make("button", { onclick: more }, `${count(sequence.num_left)} more tokens`))]);
  const whole = rollout.episode ? [episodeTree(rollout.episode), make("details", {}, make("summary", {}, "tokens"), texts)] : texts;
  return make("article", { class: "card rollout", "aria-label": `completion ${rollout.sample_index}` },
    make("header", {}, make("span", { class: "muted" }, `#${rollout.sample_index}`), make("b", { class: "reward" }, number(rollout.reward)),
      make("span", { class: `advantage ${sign}`, title: "advantage" }, rollout.advantage === null ? "" : `${rollout.advantage > 0 ? "+" : ""}${number(rollout.advantage)}`),
      pill(rollout.status, STATE_KINDS[rollout.status] ?? ""), rollout.is_greedy && pill("greedy", ""), make("span", { class: "muted" }, `${count(rollout.num_tokens)} tokens · ${rollout.finish_reason}`)),
    rewards.length > 0 && make("table", { class: "rewards" }, make("tbody", {}, rewards.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, number(value)), make("td", {}, bar(value)))))),
    versions && make("p", { class: "muted small" }, versions), rollout.text === undefined ? whole : make("div", { class: "tokens" }, rollout.text));
}

function bar(value) {
  const share = Math.min(Math.abs(value ?? 0), 1);
  return make("div", { class: `bar ${value < 0 ? "minus" : ""}`, style: { width: `${share * 100}%` } });
}
