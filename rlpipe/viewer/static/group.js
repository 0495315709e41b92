// One group: its prompt, and the completions of it side by side.

import { choose, fill, labelled, make, notice, pill } from "./dom.js";
import { episodeTree } from "./episode.js";
import { count, moment, number, NONE, STATE_KINDS } from "./format.js";
import { addressOfReturn, forgetReturn } from "./groups.js";
import { exported, imageAddress } from "./source.js";
import { COLOURINGS, legendOf, scalesOf, tokenText } from "./tokens.js";

const COLOURING = "rlpipe-colouring";
const ALL_TOKENS = 1000000;

export async function groupView(body, context) {
  if (!["groups", "group"].includes(context.cameFrom)) forgetReturn();
  const id = Number(context.query.id) || 0;
  let group = await context.ask("group", { id });
  const cards = make("div", { class: "siblings" });
  const legend = make("div", { class: "legend" });
  const how = () => sessionStorage.getItem(COLOURING) ?? "logprob";
  const select = choose("colouring", COLOURINGS, how(), (event) => { sessionStorage.setItem(COLOURING, event.target.value); draw(); });
  let tokens;

  function draw() {
    fill(cards, (group.rollouts ?? []).map((rollout) => rolloutCard(rollout, { how: how(), scales: scalesOf(group), more: readAll })));
    fill(legend, hasTokens() && legendOf(how(), group));
  }

  function hasTokens() {
    return group.rollouts?.some((rollout) => rollout.sequences.length) ?? false;
  }

  async function readAll() {
    tokens = ALL_TOKENS;
    group = await context.ask("group", { id, tokens });
    draw();
  }

  // A group that is sampled, scored or trained while it is shown.
  async function update() {
    const found = await context.ask("group", { id, tokens });
    if (JSON.stringify(found) === JSON.stringify(group)) return;
    group = found;
    drawAll();
  }

  function drawAll() {
    fill(body,
      make("div", { class: "toolbar" },
        make("a", { class: "button", href: addressOfReturn(context) }, "← Groups"),
        make("a", { class: "button", href: context.link("group", { id: Math.max(id - 1, 0) }), "aria-label": "Previous group" }, "‹"),
        make("h2", {}, `Group ${count(id)}`),
        make("a", { class: "button", href: context.link("group", { id: id + 1 }), "aria-label": "Next group" }, "›"),
        pill(group.state.toLowerCase(), STATE_KINDS[group.state] ?? ""),
        group.messages.length > 0 && make("a", { class: "button", href: context.link("compare", { text: lastText(group).slice(0, 80) }) }, "Compare this prompt")),
      facts(group), group.reason && notice(`discarded: ${group.reason}`), group.why_no_tokens && notice(group.why_no_tokens),
      group.tokenizer_problem && notice(`tokens are shown as numbers: ${group.tokenizer_problem}`),
      promptCard(group, context.run),
      hasTokens() && make("div", { class: "toolbar" }, labelled("Colour tokens by", select), legend), cards);
    draw();
  }

  drawAll();
  return { redraw: draw, update };
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
    group.messages.length ? group.messages.map((message) => make("div", { class: "message" }, message.role && make("b", {}, message.role), make("pre", {}, message.text))) : notice("it is not kept any more"), images.length > 0 && make("div", { class: "images" }, images));
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
