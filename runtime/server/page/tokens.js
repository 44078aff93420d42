// Tokens with their origin, probability and alternatives.

import { el } from "./dom.js";

export const ORIGINS = {
  forced: "forced by the grammar", drafted: "guessed and accepted", cached: "found in the cache",
  prompt: "computed prompt", selected: "selected",
};

const shown = (text) => JSON.stringify(text);
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -4 ? 1 : 3)}%`;

function likelihood(logprob) {
  if (logprob === null) return "";
  return logprob > Math.log(0.6) ? " likely" : logprob > Math.log(0.2) ? " even" : " unlikely";
}

// `token`: { text, origin, logprob (or null), top: [[text, logprob], ...] }
export function tokenSpan(token) {
  const origin = token.origin === "generated" ? "" : ` ${token.origin}`;
  const span = el("span", { class: `token${origin}${likelihood(token.logprob)}`, text: token.text });
  const lines = [];
  if (ORIGINS[token.origin]) lines.push(ORIGINS[token.origin]);
  if (token.logprob !== null) lines.push(`${shown(token.text)} ${percent(token.logprob)}`);
  const others = token.top.filter(([text]) => text !== token.text);
  if (others.length) lines.push("instead of it:", ...others.map(([text, p]) => `  ${percent(p).padStart(7)} ${shown(text)}`));
  if (lines.length) {
    span.dataset.tip = lines.join("\n");
    span.tabIndex = -1;
  }
  return span;
}

// Alternatives on hover and on keyboard focus: the first token takes the tab stop, arrow keys go on.
export function showTips(container) {
  let tip = null;
  const hide = () => { tip?.remove(); tip = null; };
  const show = (target) => {
    hide();
    if (!target?.dataset?.tip) return;
    tip = el("div", { id: "tip", role: "tooltip", text: target.dataset.tip });
    document.body.append(tip);
    const place = target.getBoundingClientRect(), size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(place.left, innerWidth - size.width - 4))}px`;
    const below = place.bottom + 4;
    tip.style.top = `${below + size.height < innerHeight ? below : Math.max(4, place.top - size.height - 4)}px`;
    target.setAttribute("aria-describedby", "tip");
  };
  container.addEventListener("mouseover", (event) => show(event.target.closest?.("[data-tip]")));
  container.addEventListener("mouseout", hide);
  container.addEventListener("focusin", (event) => show(event.target));
  container.addEventListener("focusout", hide);
  container.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    const all = [...container.querySelectorAll("[data-tip]")];
    const at = all.indexOf(document.activeElement);
    const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step];
    if (next) { event.preventDefault(); next.focus(); }
  });
}
