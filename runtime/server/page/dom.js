// Small helpers for elements. Texts of users and models are always set as text, never as HTML.

export const $ = (id) => document.getElementById(id);

export function el(name, options = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") element.className = value;
    else if (key === "text") element.textContent = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export function say(element, text, isBad = false) {
  if (element.textContent !== text) element.textContent = text;
  element.classList.toggle("bad", isBad);
  element.classList.toggle("quiet", !isBad);
}

export const count = (value) => Math.round(value).toLocaleString("en");

export function seconds(value) {
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(1000 * value).toFixed(value >= 0.01 ? 0 : 1)} ms`;
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export function legend(place, entries) {
  place.replaceChildren(...entries.map(([name, text]) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = `var(--${name})`;
    return el("span", {}, swatch, text);
  }));
}

export function rows(table, values) {
  table.tBodies[0].replaceChildren(...values.map((cells) => el("tr", {}, ...cells.map((cell, i) =>
    el("td", { class: i === 0 ? "wide" : "", text: String(cell) })))));
}

// A canvas sized for the screen; returns its context, and its size in CSS pixels.
export function drawing(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// Calls `tick` every `period` milliseconds while `panel` is shown, one call at a time.
export function whileShown(panel, period, tick) {
  let timer = 0;
  async function turn() {
    if (!panel.hidden && !document.hidden) await tick();
    timer = setTimeout(turn, period);
  }
  const restart = () => { clearTimeout(timer); turn(); };
  panel.addEventListener("shown", restart);
  document.addEventListener("visibilitychange", restart);
}
