// The chat: streams, with the options of the form, and shows each token's origin and probability.

import { events, lines, request } from "./api.js";
import { $, count, el, legend, say } from "./dom.js";
import { ORIGINS, showTips, tokenSpan } from "./tokens.js";

const PAUSE_MS = 500; // after the last key, before the server is asked what it thinks of a schema
const EXAMPLE_TOOLS = '[{"type": "function", "function": {"name": ..., "parameters": {...}}}]';

let messages = []; // of the conversation, as the API takes them
let running = null; // the AbortController of the answer under way

export function startChat() {
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("again").addEventListener("click", again);
  $("clear").addEventListener("click", () => { running?.abort(); messages = []; $("messages").replaceChildren(); update(); });
  $("tools").placeholder = EXAMPLE_TOOLS;
  $("schema").placeholder = '{"type": "object", "properties": {...}}';
  let timer = 0;
  $("schema").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(checkSchema, PAUSE_MS); });
  $("tools").addEventListener("input", () => { try { readTools(); } catch { /* its line says why */ } });
  showTips($("messages"));
  legend($("chat-legend"), [["forced", ORIGINS.forced], ["wait", "underlined: chosen with 20% to 60%"], ["gone", "underlined: below 20%"]]);
}

function ask() {
  const text = $("question").value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  show("you").textContent = text;
  $("question").value = "";
  answer();
}

function again() {
  while (messages.length && messages.at(-1).role !== "user") messages.pop();
  const place = $("messages");
  while (place.lastChild && place.lastChild.dataset.who !== "you") place.lastChild.remove();
  if (messages.length && !running) answer();
}

function show(who) {
  const said = el("div", { class: "said" });
  const message = el("div", { class: "message" }, el("div", { class: "who", text: who }), said);
  message.dataset.who = who;
  $("messages").append(message);
  $("messages").scrollTop = $("messages").scrollHeight;
  return said;
}

function update() {
  $("send").disabled = Boolean(running);
  $("stop").disabled = !running;
  $("again").disabled = Boolean(running) || !messages.some((message) => message.role === "user");
}

// The request's body; throws an Error that says which field is wrong.
function body() {
  const system = $("system").value.trim();
  const made = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: 5,
  };
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"], ["top-p", "top_p"], ["seed", "seed"]]) {
    if ($(id).value !== "") made[name] = Number($(id).value);
  }
  const schema = $("schema").value.trim();
  if (schema) {
    const problem = jsonProblem(schema);
    if (problem) throw new Error(`the JSON schema: ${problem}`);
    made.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  }
  const tools = readTools();
  if (tools) made.tools = tools;
  return made;
}

async function answer() {
  let made;
  try {
    made = body();
  } catch (error) {
    say($("chat-state"), error.message, true);
    messages.pop();
    $("messages").lastChild.remove();
    return;
  }
  running = new AbortController();
  update();
  say($("chat-state"), "Answering …");
  const said = show("model");
  const begun = performance.now();
  const result = { content: "", reasoning: "", calls: [] };
  let usage = null, first = 0;
  try {
    const response = await request("v1/chat/completions", { method: "POST", body: made, signal: running.signal });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      first ||= performance.now();
      take(said, choice, result);
      if (choice.finish_reason && choice.finish_reason !== "stop") result.reason = choice.finish_reason;
    }
    say($("chat-state"), summary(usage, performance.now() - begun, first - begun, result.reason));
  } catch (error) {
    const wasStopped = error.name === "AbortError";
    say($("chat-state"), wasStopped ? "Stopped." : error.message, !wasStopped);
  }
  running = null;
  const message = { role: "assistant", content: result.content || null };
  if (result.calls.length) message.tool_calls = result.calls;
  if (message.content !== null || message.tool_calls) messages.push(message);
  update();
  $("question").focus();
}

function take(said, choice, result) {
  const { delta } = choice;
  const box = $("messages"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  if (delta.reasoning_content) {
    result.reasoning += delta.reasoning_content;
    let place = said.querySelector("details");
    if (!place) said.prepend(place = el("details", {}, el("summary", { text: "Reasoning" }), el("span")));
    place.lastChild.textContent = result.reasoning;
  }
  for (const call of delta.tool_calls ?? []) {
    const known = result.calls[call.index] ??= { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } };
    known.function.arguments += call.function.arguments ?? "";
    let place = said.querySelector(`[data-call="${call.index}"]`);
    if (!place) { said.append(place = el("div", { class: "code" })); place.dataset.call = call.index; }
    place.textContent = `${known.function.name}(${known.function.arguments})`;
  }
  if (delta.content) {
    result.content += delta.content;
    said.append(...spans(delta.content, choice.logprobs?.content ?? []));
  }
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

// A piece of text as tokens: what no log-probability belongs to was forced, and has no alternatives.
function spans(text, tokens) {
  const made = [];
  let at = 0;
  for (const token of tokens) {
    const found = text.indexOf(token.token, at);
    if (found < 0) continue; // a part of a character, or a text that was held back
    if (found > at) made.push(tokenSpan({ text: text.slice(at, found), origin: "forced", logprob: null, top: [] }));
    const top = token.top_logprobs.map((other) => [other.token, other.logprob]);
    made.push(tokenSpan({ text: token.token, origin: "generated", logprob: token.logprob, top }));
    at = found + token.token.length;
  }
  const rest = text.slice(at);
  if (rest) made.push(tokenSpan({ text: rest, origin: tokens.length ? "generated" : "forced", logprob: null, top: [] }));
  return made;
}

function summary(usage, allMs, firstMs, reason) {
  if (!usage) return "";
  const rest = Math.max(allMs - firstMs, 1) / 1000;
  const parts = [`${count(usage.completion_tokens)} tokens`];
  if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / rest).toFixed(1)} a second`);
  parts.push(`first after ${count(firstMs)} ms`, `${count(usage.prompt_tokens)} tokens of prompt, ${count(usage.prompt_tokens_details?.cached_tokens ?? 0)} of them from the cache`);
  const forced = usage.completion_tokens_details?.forced_tokens;
  if (forced) parts.push(`${count(forced)} forced`);
  if (reason) parts.push(`ended by ${reason}`);
  return parts.join(" · ");
}

// What is wrong with a text as JSON; empty if nothing is.
function jsonProblem(text) {
  try { JSON.parse(text); return ""; } catch (error) { return `not JSON yet: ${error.message}`; }
}

function readTools() {
  const text = $("tools").value.trim();
  const state = $("tools-state");
  if (!text) { say(state, ""); return null; }
  const problem = jsonProblem(text);
  if (problem) { say(state, problem, true); throw new Error(`the tools: ${problem}`); }
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) { say(state, "a list of tools is needed: [ ... ]", true); throw new Error("the tools are no list"); }
  say(state, `${tools.length} ${tools.length === 1 ? "tool" : "tools"}: ${tools.map((tool) => tool?.function?.name ?? "?").join(", ")}`);
  return tools.length ? tools : null;
}

// Asks the engine whether it takes the schema: an answer of no tokens compiles it.
async function checkSchema() {
  const state = $("schema-state"), text = $("schema").value.trim();
  if (!text) { say(state, ""); return; }
  const problem = jsonProblem(text);
  if (problem) { say(state, problem, true); return; }
  say(state, "Checking …");
  const ops = [
    { t: "text", op: 0, seq: 0, text: " " },
    { t: "gen", op: 1, seq: 0, params: { max_tokens: 0 }, grammar: { kind: "json_schema", text } },
    { t: "close", op: 2, seq: 0 },
  ];
  try {
    const program = `schema-${crypto.randomUUID?.() ?? Math.random()}`;
    for await (const line of lines(await request("v1/programs", { method: "POST", body: { program, ops } }))) {
      const message = line.trim() && JSON.parse(line);
      if (message && message.m === "failed") throw new Error(message.error.message);
    }
    if (text === $("schema").value.trim()) say(state, "The answer will follow this schema.");
  } catch (error) {
    if (text === $("schema").value.trim()) say(state, error.message, true);
  }
}
