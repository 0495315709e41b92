// Tokens of a completion, coloured by one of their values.

import { hideTooltip, make, showTooltip } from "./dom.js";
import { number } from "./format.js";

const DEEPEST = -6;
const LEAST_DIFFERENCE = 1e-6;
export const COLOURINGS = [["logprob", "log-prob"], ["advantage", "advantage"], ["difference", "the learner's log-prob difference"], ["version", "policy version"], ["mask", "loss mask"], ["none", "nothing"]];

function advantageAt(sequence, index) {
  return sequence.advantages?.[index] ?? null;
}

// The strength of a tint, from 0 to 1, and which of the tints it is.
function tint(how, sequence, index, { oldest = 0, largest = 0 }) {
  if (how === "mask") return sequence.mask[index] ? ["trained", 1] : null;
  if (!sequence.mask[index]) return null;
  if (how === "logprob") return sequence.logprobs[index] === null ? ["unknown", 1] : ["unlikely", Math.min(sequence.logprobs[index] / DEEPEST, 1)];
  if (how === "advantage") {
    const value = advantageAt(sequence, index);
    return value === null ? null : [value >= 0 ? "positive" : "negative", Math.min(Math.abs(value) / 2, 1)];
  }
  if (how === "difference") {
    const value = sequence.differences[index];
    return value === null || !largest ? null : [value >= 0 ? "positive" : "negative", Math.abs(value) / largest];
  }
  return how === "version" ? [`series-${Math.max(sequence.versions[index] - oldest, 0) % 8}`, 0.7] : null;
}

// The tints of a group: its oldest policy version, and the difference that has the strongest tint.
export function scalesOf(group) {
  const versions = (group.rollouts ?? []).flatMap((rollout) => Object.keys(rollout.versions).map(Number));
  return { oldest: Math.min(...versions), largest: Math.max(group.differences?.max ?? 0, LEAST_DIFFERENCE) };
}

function describe(sequence, index) {
  const drawn = sequence.mask[index], difference = sequence.differences[index], logprob = sequence.logprobs[index];
  return [
    JSON.stringify(sequence.pieces[index]),
    ...(drawn ? [logprob === null ? "log-prob unknown" : `log-prob ${number(logprob)} (probability ${number(Math.exp(logprob))})`, difference !== null && `the learner's log-prob ${number(logprob + difference)} (difference ${number(difference)})`, `policy version ${sequence.versions[index]}`, `advantage ${number(advantageAt(sequence, index))}`] : ["not drawn by the policy, not trained"]),
  ].filter(Boolean);
}

export function tokenText(sequence, how, scales) {
  const spans = sequence.pieces.map((text, index) => {
    const shade = tint(how, sequence, index, scales);
    const element = make("span", { class: `token${shade ? ` tint ${shade[0]}` : ""}${how === "mask" && !sequence.mask[index] ? " unmasked" : ""}`, "data-at": index }, text);
    if (shade) element.style.setProperty("--strength", `${Math.round(shade[1] * 38)}%`);
    return element;
  });
  let chosen = -1;
  const choose = (at) => {
    spans[chosen]?.classList.remove("chosen");
    chosen = at;
    if (!(at in spans)) return hideTooltip();
    spans[at].classList.add("chosen");
    spans[at].scrollIntoView({ block: "nearest" });
    const { left, bottom } = spans[at].getBoundingClientRect();
    showTooltip(describe(sequence, at), left, bottom);
  };
  return make("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "completion; left and right go from token to token", "aria-describedby": "tooltip",
    onkeydown: (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const places = { ArrowRight: Math.min(chosen + 1, spans.length - 1), ArrowLeft: Math.max(chosen - 1, 0), Home: 0, End: spans.length - 1, Escape: -1 };
      if (!(event.key in places)) return;
      event.preventDefault();
      choose(places[event.key]);
    }, onblur: () => choose(-1),
    onmousemove: (event) => {
      const at = event.target.dataset?.at;
      if (at === undefined) hideTooltip();
      else showTooltip(describe(sequence, Number(at)), event.clientX, event.clientY);
    }, onmouseleave: hideTooltip }, spans);
}

export function legendOf(how, group) {
  const key = (kind, strength, text) => {
    const swatch = make("span", { class: `token tint ${kind}` }, " a ");
    swatch.style.setProperty("--strength", `${strength}%`);
    return make("span", { class: "key" }, swatch, ` ${text}`);
  };
  if (how === "logprob") return [key("unlikely", 0, "log-prob 0"), key("unlikely", 19, "-3"), key("unlikely", 38, "-6 and below"), key("unknown", 38, "unknown")];
  if (how === "advantage") return [key("positive", 30, "written again more often"), key("negative", 30, "less often"), "those that a critic or the KL has changed are not kept"];
  if (how === "difference") {
    const { mean, max } = group.differences ?? {};
    if (max === undefined) return ["not known: no step has trained these tokens (those with an advantage of 0 are left out), or it is not kept"];
    return [key("positive", 38, `the learner's is higher, by ${number(max)}`), key("negative", 38, "lower"), `absolute mean ${number(mean)}`];
  }
  if (how === "mask") return [key("trained", 38, "trained"), "pale: not sampled by the policy"];
  if (how !== "version") return [];
  const versions = [...new Set(group.rollouts.flatMap((rollout) => Object.keys(rollout.versions).map(Number)))].sort((one, other) => one - other);
  return versions.map((version) => key(`series-${(version - versions[0]) % 8}`, 27, `version ${version}`));
}
