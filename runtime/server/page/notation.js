// The notation of the Program tab, compiled to the operations of `POST /v1/programs`. It looks like a body of
// `@function`, and it is all there is: no expression of a user is ever evaluated, here or on the server.
//
//   s += "text" + gen("name", max_tokens=20) + s["name"]      append
//   a, b = s.fork(2)                                           sequences that begin as `s` does here
//   s += user("...") + assistant(gen("answer"))                messages of the model's chat template
//   s += select("mood", ["glad", "sad"])                       the likelier of the texts
//   s += a["plan"]                                             what another sequence has made

const TOKEN = /\s*(?:(#[^\n]*)|("""[\s\S]*?"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(-?\d+(?:\.\d+)?)|([A-Za-z_]\w*)|(\+=|[-+=.,()[\]{}:]))/y;
const ESCAPES = { n: "\n", t: "\t", r: "\r", "\n": "" };
const CONSTANTS = { True: true, False: false, None: null };

export class NotationError extends Error {
  constructor(line, message) { super(`line ${line}: ${message}`); }
}

function tokenize(source) {
  const tokens = [];
  let line = 1, at = 0;
  while (source.slice(at).trim()) {
    TOKEN.lastIndex = at;
    const found = TOKEN.exec(source);
    const begins = at + (source.slice(at).match(/^\s*/)[0].length);
    line += source.slice(at, begins).split("\n").length - 1;
    if (!found) throw new NotationError(line, `${JSON.stringify(source.slice(begins, begins + 12))} is not understood`);
    const [, comment, text, number, name, sign] = found;
    if (text !== undefined) {
      const width = text.startsWith('"""') ? 3 : 1;
      tokens.push({ kind: "text", line, value: text.slice(width, -width).replace(/\\([\s\S])/g, (_, c) => ESCAPES[c] ?? c) });
    } else if (number !== undefined) tokens.push({ kind: "number", line, value: Number(number) });
    else if (name !== undefined) tokens.push({ kind: "name", line, value: name, begins: source.slice(0, begins).split("\n").pop().trim() === "" });
    else if (comment === undefined) tokens.push({ kind: sign, line, value: sign });
    line += found[0].trimStart().split("\n").length - 1;
    at = TOKEN.lastIndex;
  }
  return tokens;
}

// `template`: the `template` of GET /v1/welcome. Returns { ops, lanes: [{ seq, name }] }.
export function compile(source, template) {
  const tokens = tokenize(source);
  const ops = [], sequences = new Map([["s", 0]]), made = new Map(), marks = [];
  let at = 0, numOps = 0, numSequences = 1;

  const line = () => (tokens[at] ?? tokens.at(-1) ?? { line: 1 }).line;
  const fail = (message) => { throw new NotationError(line(), message); };
  const peek = (kind) => tokens[at]?.kind === kind;
  const take = (kind, wanted = `'${kind}'`) => peek(kind) ? tokens[at++] : fail(`${wanted} is expected${tokens[at] ? `, not ${JSON.stringify(String(tokens[at].value))}` : ""}`);
  const add = (op) => { ops.push({ ...op, op: numOps }); return numOps++; };
  const sequence = (name) => sequences.has(name) ? sequences.get(name) : fail(`there is no sequence ${name}; there are ${[...sequences.keys()].join(", ")}`);

  function value() {
    const token = tokens[at++] ?? fail("a value is expected");
    if (token.kind === "text" || token.kind === "number") return token.value;
    if (token.kind === "name" && token.value in CONSTANTS) return CONSTANTS[token.value];
    if (token.kind === "[") {
      const list = [];
      while (!peek("]")) { list.push(value()); if (!peek("]")) take(","); }
      take("]");
      return list;
    }
    if (token.kind === "{") {
      const object = {};
      while (!peek("}")) { const key = take("text", "a name in quotes").value; take(":"); object[key] = value(); if (!peek("}")) take(","); }
      take("}");
      return object;
    }
    at--;
    return fail(`${JSON.stringify(token.value)} is no value`);
  }

  function args() {
    const positional = [], named = {};
    take("(");
    while (!peek(")")) {
      if (peek("name") && tokens[at + 1]?.kind === "=") { const name = take("name").value; take("="); named[name] = value(); }
      else positional.push(value());
      if (!peek(")")) take(",");
    }
    take(")");
    return { positional, named };
  }

  function remember(seq, name, op) {
    if (typeof name !== "string" || !name) fail("a name in quotes comes first");
    made.set(`${seq} ${name}`, op);
  }

  function role(seq, kind) {
    const about = template.roles?.[kind];
    if (!about) fail(`this model's chat template has no role ${kind}`);
    if (kind !== "system" && !marks[seq] && template.default_system?.length) add({ t: "special", seq, ids: template.default_system });
    marks[seq] = true;
    take("(");
    if (about.prefix.length) add({ t: "special", seq, ids: about.prefix });
    terms(seq);
    if (about.suffix.length) add({ t: "special", seq, ids: about.suffix });
    take(")");
  }

  function generate(seq) {
    const { positional: [name], named: { regex, json_schema, choices, ...params } } = args();
    const grammars = [["regex", regex], ["json_schema", json_schema], ["choices", choices]].filter(([, given]) => given !== undefined);
    if (grammars.length > 1) fail(`one of ${grammars.map(([kind]) => kind).join(" and ")}, not both`);
    const op = { t: "gen", seq, stream: true, params: { stop_token_ids: template.stop_token_ids ?? [], ...params } };
    if (grammars.length) {
      const [kind, given] = grammars[0];
      op.grammar = { kind, text: typeof given === "string" ? given : JSON.stringify(given) };
    }
    if (typeof op.params.stop === "string") op.params.stop = [op.params.stop];
    remember(seq, name, add(op));
  }

  function term(seq) {
    if (peek("text")) { add({ t: "text", seq, text: tokens[at++].value }); return; }
    const name = take("name", "a text, gen, select, a role or a sequence").value;
    if (["user", "assistant", "system"].includes(name)) role(seq, name);
    else if (name === "gen") generate(seq);
    else if (name === "select") {
      const { positional: [label, list], named } = args();
      const choices = named.choices ?? list;
      if (!Array.isArray(choices) || !choices.length) fail('select takes a name and a list: select("mood", ["glad", "sad"])');
      remember(seq, label, add({ t: "select", seq, choices }));
    } else {
      const from = sequence(name);
      take("[");
      const label = take("text", "a name in quotes").value;
      take("]");
      const source = made.get(`${from} ${label}`) ?? fail(`${name} has made no ${JSON.stringify(label)} yet`);
      add({ t: "ref", seq, source });
    }
  }

  function terms(seq) {
    if (peek(")")) return;
    term(seq);
    while (peek("+")) { at++; term(seq); }
  }

  while (at < tokens.length) {
    const names = [take("name", "a sequence's name").value];
    while (peek(",")) { at++; names.push(take("name").value); }
    if (peek("+=")) {
      at++;
      if (names.length > 1) fail("one sequence is appended to at a time");
      terms(sequence(names[0]));
      if (tokens[at] && !tokens[at].begins) fail(`'+' or a new line is expected, not ${JSON.stringify(String(tokens[at].value))}`);
      continue;
    }
    take("=", "'+=' or '='");
    const parent = sequence(take("name").value);
    take(".");
    if (take("name").value !== "fork") fail("a sequence has one method: fork");
    const { positional: [number] } = args();
    if (number !== names.length) fail(`fork(${names.length}) is expected, for ${names.length} ${names.length === 1 ? "name" : "names"}`);
    const children = names.map((name) => {
      if (sequences.has(name)) fail(`there is a sequence ${name} already`);
      sequences.set(name, numSequences);
      marks[numSequences] = marks[parent];
      for (const [key, op] of [...made]) if (key.startsWith(`${parent} `)) made.set(`${numSequences} ${key.slice(String(parent).length + 1)}`, op);
      return numSequences++;
    });
    add({ t: "fork", seq: parent, children });
  }
  if (!ops.length) fail('the program is empty; begin with: s += "text"');
  for (const seq of sequences.values()) add({ t: "close", seq });
  return { ops, lanes: [...sequences].map(([name, seq]) => ({ name, seq })) };
}
