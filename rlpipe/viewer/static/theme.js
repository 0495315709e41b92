// Dark or light: the system's choice, until the button is pressed.

import { make } from "./dom.js";
import { keep, recall } from "./storage.js";

const KEY = "rlpipe-theme";

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function themeButton(changed) {
  const chosen = recall(KEY, "localStorage");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  const button = make("button", { class: "quiet", id: "theme", onclick: () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    keep(KEY, theme, "localStorage");
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
