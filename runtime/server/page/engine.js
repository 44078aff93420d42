// The engine: its batch and KV pool step by step, its queue, drafts, throughput and latency, and the replicas.

import { get } from "./api.js";
import { $, color, count, drawing, el, rows, say, seconds, whileShown } from "./dom.js";
import { setReplicas } from "./cache.js";

const PERIOD_MS = 1000;
const KEPT = 300; // points of a plot: five minutes

const PLOTS = [
  ["tokens", "Tokens computed a second", (value) => count(value)],
  ["generated", "Rows a second (decoded tokens and prompts)", (value) => count(value)],
  ["step", "Seconds of a step, mean", seconds],
  ["waiting", "Waiting sequences", (value) => count(value)],
  ["accepted", "Share of drafted tokens that were accepted", (value) => `${(100 * value).toFixed(0)}%`],
];

let history = []; // { at, metrics } of the chosen engine
let chosen = "";
let steps = [];

export function startEngine() {
  $("plots").append(...PLOTS.map(([name, title]) => {
    const figure = el("figure", {}, el("figcaption", { id: `plot-${name}-title`, text: title }));
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 300 100");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-labelledby", `plot-${name}-title`);
    svg.append(document.createElementNS("http://www.w3.org/2000/svg", "path"));
    svg.id = `plot-${name}`;
    figure.append(svg);
    return figure;
  }));
  whileShown($("engine"), PERIOD_MS, update);
  for (const name of ["resize", "themed"]) window.addEventListener(name, drawSteps);
}

async function update() {
  let found;
  try {
    found = await get("engines");
  } catch (error) {
    say($("engine-state"), error.message, true);
    return;
  }
  const names = Object.keys(found.engines);
  setReplicas($("engine-replica"), names, names[0]);
  showReplicas(found);
  const name = $("engine-replica").value || names[0];
  if (name !== chosen) { chosen = name; history = []; }
  const engine = found.engines[name];
  if (!engine) { say($("engine-state"), `engine ${name} does not answer`, true); return; }
  history.push({ at: found.now_s, metrics: engine.metrics });
  history = history.slice(-KEPT - 1);
  steps = engine.batch.steps;
  say($("engine-state"), `${count(found.requests_in_flight)} HTTP requests under way · ${count(engine.metrics.steps)} steps so far`);
  showTiles(engine.metrics);
  showPool(engine.metrics.slots);
  showBatch(engine.batch);
  drawSteps();
  drawPlots();
}

const sum = (parts) => Object.values(parts ?? {}).reduce((all, value) => all + value, 0);

function rate(name) {
  const last = history.at(-1), first = history.at(-6) ?? history[0];
  return last.at > first.at ? (last.metrics[name] - first.metrics[name]) / (last.at - first.at) : 0;
}

function showTiles(metrics) {
  const drafted = sum(metrics.drafted_tokens), accepted = sum(metrics.accepted_tokens);
  const tiles = [
    ["running", count(metrics.running)], ["waiting", count(metrics.waiting)], ["programs", count(metrics.programs)],
    ["rows a second", count(rate("forward_rows"))], ["tokens computed a second", count(rate("forward_tokens"))],
    ["of prompts found in the cache", `${(100 * metrics.cache_hit_rate).toFixed(1)}%`],
    ["drafted tokens accepted", drafted ? `${((100 * accepted) / drafted).toFixed(0)}% of ${count(drafted)}` : "none drafted"],
    ["preemptions", count(metrics.preemptions)], ["evicted tokens", count(sum(metrics.cache_evicted_tokens))],
  ];
  $("tiles").replaceChildren(...tiles.map(([label, value]) => el("div", {}, el("b", { text: value }), label)));
}

function showPool(slots) {
  const used = slots.locked + slots.leased, kept = slots.cached - slots.locked;
  const part = (name, value) => { const bar = el("i", { class: name }); bar.style.width = `${(100 * value) / slots.total}%`; return bar; };
  $("pool").replaceChildren(part("used", used), part("kept", kept));
  const text = `${count(used)} slots in use, ${count(kept)} kept for later, ${count(slots.free)} free, of ${count(slots.total)}`;
  $("pool").setAttribute("aria-label", text);
  $("pool-text").textContent = text;
}

function showBatch(batch) {
  rows($("batch"), batch.sequences.map((seq) => [
    seq.state, seq.name || seq.program || "", count(seq.tokens), count(seq.computed), count(seq.cached),
    seq.generated === undefined ? "" : `${count(seq.generated)} of ${count(seq.max_tokens)}`,
    seq.drafted ? `${count(seq.accepted)} of ${count(seq.drafted)}` : "", seq.has_grammar ? count(seq.forced) : "",
  ]));
}

function showReplicas(found) {
  rows($("replicas"), found.replicas.map((replica) => [
    replica.name, replica.state, ...["programs", "running", "waiting"].map((name) => count(replica.load?.[name] ?? 0)),
    replica.load ? `${(100 * replica.load.cache_hit_rate).toFixed(1)}%` : "", count(replica.restarts), replica.last_error ?? "",
  ]));
}

// A bar for each step: its width is its time, its height its tokens; below the line the slots in use.
function drawSteps() {
  if ($("engine").hidden) return;
  const { context, width, height } = drawing($("steps"));
  if (!steps.length) { $("steps-text").textContent = "No step yet."; return; }
  const all = steps.reduce((time, step) => time + step[4], 0), most = Math.max(...steps.map((step) => step[2]), 1);
  const paint = { decode: color("used"), prompt: color("wait"), line: color("line") };
  let x = 0;
  for (const [, numRows, tokens, , time] of steps) {
    const w = (width * time) / all, h = (height - 4) * Math.sqrt(tokens / most), own = (h * numRows) / Math.max(tokens, 1);
    context.fillStyle = paint.prompt;
    context.fillRect(x, height - h, Math.max(w - 0.5, 0.5), h);
    context.fillStyle = paint.decode;
    context.fillRect(x, height - own, Math.max(w - 0.5, 0.5), own);
    x += w;
  }
  const [step, numRows, tokens, drafted, time, running, waiting] = steps.at(-1);
  $("steps-text").textContent = `The last ${count(steps.length)} steps took ${seconds(all)}; width: time, height: tokens (square root; at most ${count(most)}), lower part: rows. ` +
    `Step ${count(step)}: ${count(numRows)} rows, ${count(tokens)} tokens (${count(drafted)} drafted), ${seconds(time)}; ${count(running)} ran, ${count(waiting)} waited.`;
}

function series(name) {
  const values = [];
  for (let i = 1; i < history.length; i++) {
    const { at, metrics } = history[i], { at: atBefore, metrics: before } = history[i - 1];
    const dt = Math.max(at - atBefore, 1e-3), numSteps = metrics.steps - before.steps;
    const drafted = sum(metrics.drafted_tokens) - sum(before.drafted_tokens);
    values.push({
      tokens: (metrics.forward_tokens - before.forward_tokens) / dt,
      generated: (metrics.forward_rows - before.forward_rows) / dt,
      step: numSteps > 0 ? (metrics.step_seconds - before.step_seconds) / numSteps : 0,
      waiting: metrics.waiting,
      accepted: drafted > 0 ? (sum(metrics.accepted_tokens) - sum(before.accepted_tokens)) / drafted : 0,
    }[name]);
  }
  return values;
}

function drawPlots() {
  for (const [name, title, shown] of PLOTS) {
    const values = series(name), most = Math.max(...values, 1e-9), step = 300 / Math.max(values.length - 1, 30);
    const path = values.map((value, i) => `${i ? "L" : "M"}${(step * i).toFixed(1)} ${(96 - (92 * value) / most).toFixed(1)}`).join("");
    $(`plot-${name}`).firstChild.setAttribute("d", path);
    $(`plot-${name}-title`).textContent = `${title}: ${shown(values.at(-1) ?? 0)} now, ${shown(most < 1e-6 ? 0 : most)} at most`;
  }
}
