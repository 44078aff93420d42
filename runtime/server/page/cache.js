// The radix tree, drawn as nested boxes. A box is a piece of text that some prompts share; below it (to the right)
// lie the pieces that follow it. Height: tokens in the box and behind it. Width: tokens of the piece.

import { get } from "./api.js";
import { $, color, count, drawing, legend, rows, say, whileShown } from "./dom.js";

const PERIOD_MS = 1500;
const GHOST_MS = 4000; // an evicted piece is shown for so long
const MIN_HEIGHT = 1.5; // of a box that is drawn, in pixels
const TABLE_ROWS = 20;

let tree = layout([], []);
let focus = null; // the id of the piece that fills the canvas; null: all
let chosen = null; // the id of the chosen piece
let boxes = []; // what is drawn: { node, x, y, width, height }
let pan = { x: 0, scale: 1 }; // of the horizontal axis

export function startCache() {
  const canvas = $("tree");
  legend($("cache-legend"), [["used", "in use now"], ["kept", "kept, used before"], ["pin", "pinned"], ["gone", "evicted just now"], ["free", "root"]]);
  whileShown($("cache"), PERIOD_MS, update);
  canvas.addEventListener("click", (event) => { const node = at(event); if (node) { choose(node.id); zoom(node.id); } });
  canvas.addEventListener("mousemove", (event) => { const node = at(event); canvas.style.cursor = node ? "pointer" : ""; if (node) describe(node); });
  canvas.addEventListener("mouseleave", () => describe(tree.byId.get(chosen)));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const scale = Math.min(40, Math.max(1, pan.scale * Math.exp(-event.deltaY / 400)));
    const x = event.offsetX;
    pan = { scale, x: Math.min(0, x - ((x - pan.x) * scale) / pan.scale) };
    draw();
  }, { passive: false });
  canvas.addEventListener("keydown", onKey);
  $("zoom-out").addEventListener("click", () => zoom(null));
  for (const name of ["resize", "themed"]) window.addEventListener(name, draw);
}

async function update() {
  if ($("freeze").checked) return;
  try {
    const found = await get(`cache_nodes?replica=${encodeURIComponent($("cache-replica").value)}`);
    setReplicas($("cache-replica"), found.replicas, found.replica);
    show(found);
  } catch (error) {
    say($("cache-state"), error.message, true);
  }
}

export function setReplicas(select, names, chosenName) {
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") === names.join("\n")) return;
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosenName)));
}

// `found`: the answer of GET /cache_nodes
export function show(found) {
  const now = performance.now(), before = tree;
  tree = layout(found.roots, found.nodes);
  for (const [id, node] of before.byId) {
    if (tree.byId.has(id) || node.isRoot) continue;
    const goneAt = node.goneAt ?? now;
    if (now - goneAt > GHOST_MS) continue;
    const parent = tree.byId.get(node.parent);
    if (parent && !parent.goneAt) adopt(parent, { ...node, goneAt, children: [] });
  }
  if (focus !== null && !tree.byId.has(focus)) focus = null;
  const { slots } = found;
  say($("cache-state"), `${count(found.nodes.length)} pieces${found.num_hidden ? ` (${count(found.num_hidden)} more, used longest ago, are left out)` : ""} · ` +
    `${count(slots.cached)} tokens kept, ${count(slots.locked)} of them in use · ${count(slots.free)} of ${count(slots.total)} slots free · ` +
    `${count(found.evicted_tokens.space)} tokens evicted for space so far`);
  draw();
  describe(tree.byId.get(chosen));
  const most = [...tree.byId.values()].filter((node) => !node.isRoot && !node.goneAt).sort((a, b) => b.hits - a.hits || b.tokens - a.tokens);
  rows($("pieces"), most.slice(0, TABLE_ROWS).map((node) => [node.text, count(node.tokens), count(node.hits), node.programs.join(", "), node.isPinned ? "yes" : ""]));
}

function layout(roots, nodes) {
  const byId = new Map(), top = [];
  for (const [i, name] of roots.entries()) {
    const root = { id: `root ${i}`, isRoot: true, text: name || "no salt, no adapter", tokens: 0, locks: 0, hits: 0, children: [], programs: [], parent: null };
    byId.set(root.id, root);
    top.push(root);
  }
  for (const [id, parent, tokens, locks, isPinned, hits, lastUse, text, programs] of nodes) {
    const node = { id, parent: parent < 0 ? `root ${-1 - parent}` : parent, tokens, locks, isPinned, hits, lastUse, text, programs, children: [] };
    byId.set(id, node);
    byId.get(node.parent)?.children.push(node);
  }
  const weigh = [...byId.values()].reverse(); // children come after their parents
  for (const node of weigh) {
    node.weight = Math.max(1, node.tokens) + node.children.reduce((sum, child) => sum + child.weight, 0);
    node.reach = widthOf(node) + node.children.reduce((most, child) => Math.max(most, child.reach), 0);
  }
  return { byId, top };
}

function adopt(parent, ghost) {
  tree.byId.set(ghost.id, ghost);
  parent.children.push(ghost);
  ghost.weight = Math.max(1, ghost.tokens);
  ghost.reach = widthOf(ghost);
  for (let node = parent; node; node = tree.byId.get(node.parent)) node.weight += ghost.weight;
}

const widthOf = (node) => node.isRoot ? 14 : 16 + 15 * Math.log2(1 + node.tokens);

function place(width, height) {
  const made = [];
  const tops = focus === null ? tree.top : [tree.byId.get(focus)];
  const sum = tops.reduce((all, node) => all + node.weight, 0) || 1;
  const fit = Math.min(4, width / tops.reduce((most, node) => Math.max(most, node.reach), 1)) * pan.scale; // all of it is seen
  const waiting = [];
  let y = 0;
  for (const node of tops) { const part = (height * node.weight) / sum; waiting.push([node, pan.x, y, part]); y += part; }
  while (waiting.length) {
    const [node, x, top, part] = waiting.pop();
    const w = widthOf(node) * fit;
    if (x < width) {
      if (x + w > 0) made.push({ node, x, y: top, width: w, height: part });
      let at = top;
      const all = node.children.reduce((rest, child) => rest + child.weight, 0) || 1;
      for (const child of node.children) {
        const own = (part * child.weight) / all;
        if (own >= MIN_HEIGHT) waiting.push([child, x + w, at, own]);
        at += own;
      }
    }
  }
  return made;
}

export function draw() {
  if ($("cache").hidden) return 0;
  const begun = performance.now();
  const { context, width, height } = drawing($("tree"));
  boxes = place(width, height);
  const paint = { used: color("used"), kept: color("kept"), gone: color("gone"), pin: color("pin"), free: color("free"), text: color("text"), back: color("back"), focus: color("focus") };
  context.font = "12px ui-monospace, monospace";
  context.textBaseline = "middle";
  for (const { node, x, y, width: w, height: h } of boxes) {
    context.fillStyle = node.goneAt ? paint.gone : node.isRoot ? paint.free : node.locks > 0 ? paint.used : paint.kept;
    context.fillRect(x, y, w - 1, Math.max(h - 1, 1));
    if (node.isPinned) { context.fillStyle = paint.pin; context.fillRect(x, y, 4, Math.max(h - 1, 1)); }
    if (h > 13 && w > 24 && !node.isRoot) {
      context.save();
      context.beginPath();
      context.rect(x, y, w - 4, h);
      context.clip();
      context.fillStyle = paint.text;
      context.fillText(node.text.replace(/\n/g, "↵"), x + 6, y + h / 2);
      context.restore();
    }
    if (node.id === chosen) { context.strokeStyle = paint.focus; context.lineWidth = 3; context.strokeRect(x + 1.5, y + 1.5, w - 4, Math.max(h - 4, 1)); }
  }
  return performance.now() - begun;
}

function at(event) {
  const hit = boxes.find(({ x, y, width, height }) => event.offsetX >= x && event.offsetX < x + width && event.offsetY >= y && event.offsetY < y + height);
  return hit?.node;
}

function zoom(id) {
  const node = tree.byId.get(id);
  focus = !node || (node.isRoot && tree.top.length === 1) ? null : id;
  pan = { x: 0, scale: 1 };
  draw();
}

function choose(id) {
  chosen = id;
  draw();
  describe(tree.byId.get(id));
}

function describe(node) {
  const text = node ? about(node) : "Choose a piece to read about it.";
  if ($("node").textContent !== text) $("node").textContent = text;
}

function about(node) {
  if (node.isRoot) return `Root: ${node.text}. ${count(node.children.length)} beginnings.`;
  const state = node.goneAt ? "evicted just now" : node.locks > 0 ? `in use (${count(node.locks)} leases and pins)` : "kept, nobody uses it now";
  const parts = [`${count(node.tokens)} tokens, ${count(node.weight - node.tokens)} behind it`, `found ${count(node.hits)} times`, state];
  if (node.isPinned) parts.push("pinned");
  if (node.programs.length) parts.push(`used by ${node.programs.join(", ")}`);
  return `${JSON.stringify(node.text)}${node.tokens > 8 ? " …" : ""}\n${parts.join(" · ")}`;
}

function onKey(event) {
  const node = tree.byId.get(chosen) ?? tree.top[0];
  if (!node) return;
  const parent = tree.byId.get(node.parent);
  const beside = (parent ? parent.children : tree.top);
  const next = {
    ArrowRight: () => node.children[0], ArrowLeft: () => parent,
    ArrowDown: () => beside[beside.indexOf(node) + 1], ArrowUp: () => beside[beside.indexOf(node) - 1],
  }[event.key];
  if (next) { event.preventDefault(); const to = chosen === null ? node : next(); if (to) choose(to.id); }
  else if (event.key === "Enter") { event.preventDefault(); zoom(chosen); }
  else if (event.key === "Escape") zoom(null);
}
