// An episode as a tree: its turns, with the tool calls of each, and what they returned.

import { make } from "./dom.js";
import { number } from "./format.js";

function argumentsOf(call) {
  if (typeof call.arguments !== "string") return JSON.stringify(call.arguments, null, 1);
  return call.arguments;
}

function callNode(call, result) {
  return make("li", {}, make("details", { open: true, class: "call" },
    make("summary", {}, make("b", {}, call.name || "call"), " ", make("code", {}, shortened(argumentsOf(call) ?? ""))),
    make("pre", {}, argumentsOf(call) ?? ""),
    result ? make("div", { class: "result" }, make("small", {}, "returned"), make("pre", {}, result.text)) : make("small", { class: "muted" }, "no result was recorded")));
}

function shortened(text) {
  const line = text.replace(/\s+/g, " ");
  return line.length > 80 ? `${line.slice(0, 80)}…` : line;
}

// A tool's message belongs to the call of its id, or, without ids, to the first call that has none yet.
function takeResult(call, waiting) {
  const place = waiting.findIndex((message) => call.id && message.call_id === call.id);
  const at = place >= 0 ? place : waiting.findIndex((message) => !message.call_id);
  return at >= 0 ? waiting.splice(at, 1)[0] : null;
}

export function episodeTree(episode) {
  const items = [];
  let turn = 0;
  for (let at = 0; at < episode.messages.length; at += 1) {
    const message = episode.messages[at];
    if (message.role !== "assistant") {
      items.push(make("li", { class: "said" }, make("b", {}, message.name ? `${message.role} ${message.name}` : message.role), make("pre", {}, message.text)));
      continue;
    }
    const waiting = [];
    while (message.calls && episode.messages[at + 1]?.role === "tool") waiting.push(episode.messages[at += 1]);
    const calls = (message.calls ?? []).map((call) => callNode(call, takeResult(call, waiting)));
    const others = waiting.map((left) => make("li", { class: "said" }, make("b", {}, "tool"), make("pre", {}, left.text)));
    const reward = episode.turn_rewards[turn];
    items.push(make("li", {}, make("details", { open: true, class: "turn" },
      make("summary", {}, make("b", {}, `turn ${turn + 1}`), reward === undefined ? "" : make("span", { class: "pill" }, `reward ${number(reward)}`)),
      message.reasoning && make("pre", { class: "reasoning" }, message.reasoning), message.text && make("pre", {}, message.text),
      make("ul", {}, calls, others))));
    turn += 1;
  }
  return make("div", { class: "episode" }, make("ul", { "aria-label": "turns of the episode" }, items),
    make("p", { class: "muted" }, `ended: ${episode.end}${episode.reward === null ? "" : `; the environment's reward ${number(episode.reward)}`}`));
}
