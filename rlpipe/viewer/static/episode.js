// Messages with their tool calls, and what those returned: of a prompt, or of an episode as a tree of its turns.

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

// Each message with the nodes of its calls; messages of tools that follow are in those of the calls that they answer.
function withCalls(messages) {
  const found = [];
  for (let at = 0; at < messages.length; at += 1) {
    const message = messages[at];
    const waiting = [];
    while (message.calls && messages[at + 1]?.role === "tool") waiting.push(messages[at += 1]);
    const calls = (message.calls ?? []).map((call) => callNode(call, takeResult(call, waiting)));
    found.push({ message, calls: [...calls, ...waiting.map((other) => said(other))] });
  }
  return found;
}

function said(message, ...others) {
  return make("li", { class: "said" }, make("b", {}, titleOf(message)), make("pre", {}, message.text), others);
}

function titleOf({ role, name }) {
  return name ? `${role} ${name}` : role;
}

function content({ message, calls }) {
  return [message.reasoning && make("pre", { class: "reasoning" }, message.reasoning), message.text && make("pre", {}, message.text),
    calls.length > 0 && make("ul", { class: "calls", "aria-label": "tool calls" }, calls)];
}

export function messageNodes(messages) {
  return withCalls(messages).map((found) => make("div", { class: "message" }, found.message.role && make("b", {}, titleOf(found.message)), make("div", {}, content(found))));
}

export function episodeTree(episode) {
  let turn = 0;
  const items = withCalls(episode.messages).map((found) => {
    if (found.message.role !== "assistant") return said(found.message, content({ ...found, message: { reasoning: found.message.reasoning } }));
    const reward = episode.turn_rewards[turn];
    turn += 1;
    return make("li", {}, make("details", { open: true, class: "turn" },
      make("summary", {}, make("b", {}, `turn ${turn}`), reward === undefined ? "" : make("span", { class: "pill" }, `reward ${number(reward)}`)), content(found)));
  });
  return make("div", { class: "episode" }, make("ul", { "aria-label": "turns of the episode" }, items),
    make("p", { class: "muted" }, `ended: ${episode.end}${episode.reward === null ? "" : `; the environment's reward ${number(episode.reward)}`}`));
}
