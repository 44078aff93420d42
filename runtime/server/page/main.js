// The tabs, the theme, and the start of each view.

import { get } from "./api.js";
import { $, say } from "./dom.js";
import { startCache } from "./cache.js";
import { startChat } from "./chat.js";
import { startEngine } from "./engine.js";
import { startProgram } from "./program.js";

const tabs = [...document.querySelectorAll('[role="tab"]')];
const panelOf = (tab) => $(tab.getAttribute("aria-controls"));
const hashOf = (tab) => `#/${panelOf(tab).id}`; // the name of no element, which would take the first tab stop

function open(tab) {
  for (const other of tabs) {
    const isOpen = other === tab;
    other.setAttribute("aria-selected", String(isOpen));
    other.tabIndex = isOpen ? 0 : -1;
    panelOf(other).hidden = !isOpen;
  }
  history.replaceState(null, "", hashOf(tab));
  panelOf(tab).dispatchEvent(new Event("shown"));
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs[(to + tabs.length) % tabs.length];
    next.focus();
    open(next);
  });
}

const root = document.documentElement;
root.dataset.theme = localStorage.getItem("phloem-theme") ?? "";
$("theme").addEventListener("click", () => {
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("phloem-theme", root.dataset.theme);
  window.dispatchEvent(new Event("themed"));
});

startChat();
startProgram();
startCache();
startEngine();
open(tabs.find((tab) => hashOf(tab) === location.hash) ?? tabs[0]);
get("v1/models").then(
  (models) => say($("model"), models.data.map((model) => model.id).join(", ")),
  (error) => say($("chat-state"), error.message, true),
);
