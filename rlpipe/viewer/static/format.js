// Numbers and times as text.

export const NONE = "–";
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });  // far faster than toLocaleString, which makes one each time

export function number(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return size >= 100000 ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : count(value);
  return size >= 0.01 ? String(Number(value.toFixed(3))) : value.toExponential(1);
}

export function count(value) {
  return value === null || value === undefined ? NONE : WHOLE.format(Math.round(value));
}

export function moment(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const date = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

export const STATE_KINDS = {
  running: "good", finished: "good", TRAINED: "good", healthy: "good", completed: "good", ok: "good", "in a step": "good",
  idle: "good", serving: "good", failed: "bad", killed: "bad", dead: "bad", PROBLEM: "bad", silent: "warn", interrupted: "warn",
  suspect: "warn", stale: "warn", warning: "warn", truncated: "warn", DISCARDED: "warn", aborted: "bad",
};
