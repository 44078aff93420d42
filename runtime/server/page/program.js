// The Program tab: compiles the notation, runs it through /v1/programs, and shows each sequence as a lane.

import { get, lines, request } from "./api.js";
import { $, count, el, legend, say, seconds } from "./dom.js";
import { compile } from "./notation.js";
import { ORIGINS, showTips, tokenSpan } from "./tokens.js";

const EXAMPLES = {
  "Two turns of chat": `s += user("What is the capital of France?")
s += assistant(gen("capital", max_tokens=24, temperature=0))
s += user("Which river runs through it?")
s += assistant(gen("river", max_tokens=24, temperature=0))
`,
  "Three questions on one text": `s += user("The train to Lyon was two hours late, and the food was cold.")
topic, mood, language = s.fork(3)
topic += assistant("Topic: " + select("topic", ["train", "food", "weather"]))
mood += assistant("Mood: " + select("mood", ["happy", "angry"]))
language += assistant("Language: " + select("language", ["English", "French"]))
`,
  "An answer by a schema": `s += user("Please send 3 wooden tables to Paul Martin. He pays 250 euros for each.")
s += assistant(gen("order", max_tokens=80, temperature=0, json_schema={
  "type": "object", "additionalProperties": False,
  "properties": {"customer": {"type": "string"}, "item": {"type": "string"}, "quantity": {"type": "integer"}},
  "required": ["customer", "item", "quantity"]}))
`,
  "Draft, then judge": `s += user("Name one good use of an old newspaper.")
a, b = s.fork(2)
a += assistant(gen("idea", max_tokens=30, temperature=0.9, seed=1))
b += assistant(gen("idea", max_tokens=30, temperature=0.9, seed=2))
s += assistant("First idea: " + a["idea"] + "\\nSecond idea: " + b["idea"] + "\\nThe better one is the " + select("better", ["first", "second"]) + ".")
`,
};

let template = null;
let running = null; // { program, abort }

export function startProgram() {
  $("example").append(...Object.keys(EXAMPLES).map((name) => el("option", { text: name })));
  const fill = () => { $("source").value = EXAMPLES[$("example").value]; check(); };
  $("example").addEventListener("change", fill);
  $("source").addEventListener("input", check);
  $("run").addEventListener("click", run);
  $("cancel").addEventListener("click", () => running?.abort.abort());
  $("program").addEventListener("shown", async () => {
    try { template ??= (await get("v1/welcome")).template; check(); } catch (error) { say($("program-state"), error.message, true); }
  });
  showTips($("lanes"));
  legend($("program-legend"), Object.entries(ORIGINS));
  fill();
}

function check() {
  if (!template || running) return null;
  try {
    const made = compile($("source").value, template);
    say($("program-state"), `${made.ops.length} operations, ${made.lanes.length} ${made.lanes.length === 1 ? "sequence" : "sequences"}`);
    return made;
  } catch (error) {
    say($("program-state"), error.message, true);
    return null;
  }
}

async function run() {
  const made = check();
  if (!made) return;
  const program = `page-${crypto.randomUUID?.() ?? Math.random()}`;
  const lanes = new Map(made.lanes.map(({ name, seq }) => [seq, new Lane(name)]));
  const byOp = new Map(made.ops.map((op) => [op.op, op]));
  $("lanes").replaceChildren(...[...lanes.values()].map((lane) => lane.element));
  running = { program, abort: new AbortController() };
  $("run").disabled = true;
  $("cancel").disabled = false;
  say($("program-state"), "Running …");
  const begun = performance.now();
  try {
    const body = { program, ops: made.ops, settings: { trace: true } };
    const response = await request("v1/programs", { method: "POST", body, signal: running.abort.signal });
    let isClosed = false;
    for await (const line of lines(response)) {
      if (!line.trim()) continue;
      const message = JSON.parse(line);
      const op = byOp.get(message.op), lane = op && lanes.get(op.seq);
      if (message.m === "delta") lane.stream(message.text);
      else if (message.m === "done") done(op, message, lanes);
      else if (message.m === "failed") lane.fail(message.error.message);
      else if (message.m === "closed") { isClosed = true; say($("program-state"), summary(message.stats, performance.now() - begun)); }
    }
    if (!isClosed) throw new Error("the stream ended early: the engine was lost");
  } catch (error) {
    const wasCancelled = error.name === "AbortError";
    say($("program-state"), wasCancelled ? "Cancelled." : error.message, !wasCancelled);
  }
  running = null;
  $("run").disabled = false;
  $("cancel").disabled = true;
}

function done(op, message, lanes) {
  const lane = lanes.get(op.seq);
  if (op.t === "text") lane.append(op.text);
  else if (op.t === "ref") lane.append(message.value);
  else if (op.t === "fork") for (const child of op.children) lanes.get(child).begin(lane);
  else if (op.t === "gen" || op.t === "select") lane.trace(message.meta?.trace, op.t === "gen" ? message.value[0] : message.value);
}

// One sequence. Texts that no trace has covered yet are shown as they are.
class Lane {
  constructor(name) {
    this.text = el("div", { class: "text" });
    this.element = el("section", { class: "lane", "aria-label": `sequence ${name}` }, el("h3", { text: name }), this.text);
    this.live = el("span");
    this.text.append(this.live);
  }

  begin(parent) {
    this.live.before(el("span", { class: "quiet", text: `… as ${parent.element.querySelector("h3").textContent}\n` }));
  }

  append(text) { this.live.append(text); }

  stream(text) { this.live.append(text); }

  trace(trace, value) {
    if (!trace) { this.live.textContent += value; return; }
    const tokens = [...trace.prompt, ...(trace.outputs[0] ?? [])];
    this.live.replaceChildren();
    this.live.before(...tokens.map(([text, origin, logprob, top]) => tokenSpan({ text, origin, logprob: logprob ?? null, top: top ?? [] })));
  }

  fail(message) { this.element.append(el("p", { class: "bad", role: "alert", text: message })); }
}

function summary(stats, ms) {
  const of = (name) => count(stats[name] ?? 0);
  return `${seconds(ms / 1000)} · ${of("prompt_tokens")} tokens of prompt, ${of("cached_tokens")} from the cache · ` +
    `${of("generated_tokens")} generated, ${of("forced_tokens")} forced, ${of("accepted_tokens")} guessed · ${of("forwards")} steps`;
}
