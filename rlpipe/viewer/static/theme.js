// Dark or light: the system's choice, until the button is pressed.

import { make } from "./dom.js";

const KEY = "rlpipe-theme";

function stored() {
  try { return localStorage.getItem(KEY); } catch { return null; }
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function themeButton(changed) {
  const chosen = stored();
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  const button = make("button", { class: "quiet", id: "theme", onclick: () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem(KEY, theme); } catch { /* a page from a file may keep nothing */ }
    name();
    changed();
  } });
  const name = () => {
    button.textContent = isDark() ? "☀" : "☾";
    button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); changed(); });
  name();
  return button;
}
