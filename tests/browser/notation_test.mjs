// node notation_test.mjs PATH-OF-notation.js
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

// as a module, whatever the folder says of .js files
const source = readFileSync(process.argv[2], "utf8");
const { compile } = await import(`data:text/javascript,${encodeURIComponent(source)}`);
const role = (id) => ({ prefix: [id], suffix: [9] });
const template = { roles: { user: role(1), assistant: role(2), system: role(3) }, default_system: [7], stop_token_ids: [5] };
const kinds = (text) => compile(text, template).ops.map((op) => op.t).join(" ");

assert.equal(kinds('s += "a" + gen("x")'), "text gen close");
assert.equal(kinds('# a comment\ns += user("hi")  # more\ns += assistant(gen("x", max_tokens=3))'), "special special text special special gen special close");
assert.equal(kinds('s += system("be kind") + user("hi")'), "special text special special text special close");
const { ops, lanes } = compile('s += "a"\nb, c = s.fork(2)\nb += gen("x", temperature=0.5, stop="\\n", regex="[0-9]+")\ns += b["x"] + select("y", ["u", "v"])', template);
assert.deepEqual(lanes, [{ name: "s", seq: 0 }, { name: "b", seq: 1 }, { name: "c", seq: 2 }]);
assert.deepEqual(ops[1], { t: "fork", seq: 0, children: [1, 2], op: 1 });
assert.deepEqual(ops[2], { t: "gen", seq: 1, stream: true, params: { stop_token_ids: [5], temperature: 0.5, stop: ["\n"] }, grammar: { kind: "regex", text: "[0-9]+" }, op: 2 });
assert.deepEqual(ops[3], { t: "ref", seq: 0, source: 2, op: 3 });
assert.deepEqual(ops[4], { t: "select", seq: 0, choices: ["u", "v"], op: 4 });
assert.equal(ops.filter((op) => op.t === "close").length, 3);
assert.equal(compile('s += """two\nlines""" + gen("x", json_schema={"type": "object", "additionalProperties": False})', template).ops[1].grammar.text, '{"type":"object","additionalProperties":false}');
assert.equal(kinds('s += "a" + gen("x")\nb, c = s.fork(2)\nb += s["x"] + c["x"]'), "text gen fork ref ref close close close");

for (const [text, message] of [
  ["", /line 1: the program is empty/],
  ['s += "a"\nt += "b"', /line 2: there is no sequence t; there are s/],
  ['s += "a" "b"', /line 1: '\+' or a new line is expected/],
  ['s += gen(max_tokens=3)', /a name in quotes comes first/],
  ['s += gen("x", regex="a", choices=["b"])', /one of regex and choices, not both/],
  ['a, b = s.fork(3)', /fork\(2\) is expected/],
  ['s = s.fork(1)', /there is a sequence s already/],
  ['s += s["x"]', /s has made no "x" yet/],
  ['s += select("x", [])', /select takes a name and a list/],
  ['s += "a\n"', /is not understood/],
  ['s += user("a"', /line 1: '\)' is expected/],
  ['import os', /'\+=' or '=' is expected|a sequence's name|is expected/],
  ['s += __import__("os")', /there is no sequence __import__/],
]) assert.throws(() => compile(text, template), message, text);
