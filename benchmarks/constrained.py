"""What grammars cost and whether they are right: verdicts, compile, mask and accept times, ours and installed peers'.

    python -m benchmarks.constrained --data schemas.jsonl --suite draft2020-12/ [--peers] [--save]
    python -m benchmarks.constrained            # the grammars of this file alone
    python -m benchmarks.constrained --data schemas.jsonl --walks 10 --order schema    # random texts, checked by jsonschema
    python -m benchmarks.constrained --end-to-end      # 300 answers of the model under 30 schemas

``--data``: one JSON a line with ``id``, ``text`` (a schema) and ``tests`` ([{text, valid}]), as JSONSchemaBench and
MaskBench have them. ``--suite``: a folder of the JSON-Schema-Test-Suite. A valid instance has to be allowed token by
token and to end, else it counts as *over*-constrained; an invalid one has to be refused somewhere, else as *under*.
Times are of the thread, less what reading its clock costs. Each grammar is walked twice: *first* is the first time it is met, *seen* the second. ``--peers`` measures llguidance
and xgrammar in the same way, where they are installed.
"""

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from phloem.constrained import GrammarError, Vocabulary, compile
from phloem.runtime.tokenizer import Tokenizer, load_tokenizer
from phloem.runtime.weights.resolve import resolve_model

from . import RESULTS, header
from .constrained_answers import measure_answers
from .random_texts import walk_schemas

# ruff: noqa: E501

GRAMMARS = {
    "json (lark)": (
        "lark",
        r"""
        start: value
        ?value: object | array | ESCAPED_STRING | SIGNED_NUMBER | "true" | "false" | "null"
        array: "[" [value ("," value)*] "]"
        object: "{" [pair ("," pair)*] "}"
        pair: ESCAPED_STRING ":" value
        %import common.ESCAPED_STRING
        %import common.SIGNED_NUMBER
        %import common.WS
        %ignore WS
        """,
        ['{"name": "Ada", "born": 1815, "works": ["notes", null, {"n": -1.5e3}]}', "[1, 2, 3, [4, [5, [6]]]]"],
    ),
    "arithmetic (ebnf)": (
        "ebnf",
        'root ::= expr\nexpr ::= term (("+" | "-" | "*" | "/") term)*\nterm ::= [0-9]+ ("." [0-9]+)? | "(" expr ")" | "-" term',
        ["12*(3+4)-5/(6-(7+8))", "-1.5+(2*(3*(4*5)))"],
    ),
    "sql (lark)": (
        "lark",
        r"""
        start: select ";"
        select: "SELECT"i columns "FROM"i table join* where? group? order? limit?
        columns: "*" | column ("," column)*
        column: expr ("AS"i NAME)?
        table: NAME ("AS"i? NAME)? | "(" select ")" "AS"i? NAME
        join: ("LEFT"i | "INNER"i)? "JOIN"i table "ON"i expr
        where: "WHERE"i expr
        group: "GROUP"i "BY"i expr ("," expr)*
        order: "ORDER"i "BY"i expr ("ASC"i | "DESC"i)? ("," expr ("ASC"i | "DESC"i)?)*
        limit: "LIMIT"i INT
        ?expr: expr ("AND"i | "OR"i) expr | expr ("=" | "<" | ">" | "<=" | ">=" | "<>") expr
             | expr ("+" | "-" | "*" | "/") expr | "NOT"i expr | expr "IN"i "(" expr ("," expr)* ")"
             | expr "IS"i "NOT"i? "NULL"i | NAME "(" ("*" | expr ("," expr)*)? ")" | "(" expr ")"
             | NAME ("." NAME)? | NUMBER | STRING
        NAME: /[a-z_][a-z0-9_]*/i
        STRING: /'([^'\n]|'')*'/
        %import common.INT
        %import common.NUMBER
        %import common.WS
        %ignore WS
        """,
        [
            "SELECT name, COUNT(*) AS n FROM users AS u LEFT JOIN orders AS o ON u.id = o.user_id WHERE u.age >= 18 "
            "AND o.total > 9.5 GROUP BY name ORDER BY n DESC LIMIT 10;",
            "SELECT * FROM (SELECT a, b FROM t WHERE c IN (1, 2, 3)) AS s WHERE s.a IS NOT NULL OR NOT s.b = 'it''s';",
        ],
    ),
    "c-like (lark)": (
        "lark",
        r"""
        start: function+
        function: type NAME "(" [type NAME ("," type NAME)*] ")" block
        type: ("int" | "float" | "char" | "void") "*"*
        block: "{" statement* "}"
        ?statement: type NAME ("=" expr)? ";" | expr ";" | "return" expr? ";" | block
                  | "if" "(" expr ")" statement ("else" statement)? | "while" "(" expr ")" statement
                  | "for" "(" expr? ";" expr? ";" expr? ")" statement
        ?expr: expr OPERATOR expr | ("-" | "!" | "*" | "&") expr | expr "(" [expr ("," expr)*] ")"
             | expr "[" expr "]" | "(" expr ")" | NAME | NUMBER | STRING
        OPERATOR: "+" | "-" | "*" | "/" | "%" | "==" | "!=" | "<" | ">" | "<=" | ">=" | "&&" | "||" | "="
        NAME: /[A-Za-z_][A-Za-z0-9_]*/
        NUMBER: /[0-9]+(\.[0-9]+)?/
        STRING: /"([^"\\\n]|\\.)*"/
        COMMENT: /\/\/[^\n]*/
        %import common.WS
        %ignore WS
        %ignore COMMENT
        """,
        [
            'int main(int argc, char **argv) {\n  int i = 0; // count\n  for (i = 0; i < 10; i = i + 1) {\n'
            '    if (i % 2 == 0) printf("%d\\n", a[i]);\n    else return -1;\n  }\n  return 0;\n}',
        ],
    ),
    "python-like (ebnf)": (
        "ebnf",
        r"""
        root ::= stmt+
        stmt ::= simple "\n" | "def " name "(" (name (", " name)*)? "):\n" body | "if " expr ":\n" body ("else:\n" body)?
        body ::= ("    " simple "\n")+
        simple ::= "return" (" " expr)? | name " = " expr | expr | "pass"
        expr ::= atom ((" + " | " - " | " * " | " == " | " < " | " and " | " or ") atom)*
        atom ::= name ("(" (expr (", " expr)*)? ")" | "[" expr "]" | "." name)* | [0-9]+ | string | "(" expr ")" | "[" (expr (", " expr)*)? "]"
        name ::= [a-zA-Z_] [a-zA-Z0-9_]*
        string ::= "\"" [^"\\\n]* "\""
        """,
        ['def area(width, height):\n    size = width * height\n    return size\nprint(area(3, 4) + len("abc"))\n'],
    ),
    "xml (ebnf)": (
        "ebnf",
        r"""
        root ::= "<?xml version=\"1.0\"?>\n"? element "\n"?
        element ::= "<" name attribute* ("/>" | ">" (text | element | comment)* "</" name ">")
        attribute ::= space name "=" "\"" ([^<&"] | entity)* "\""
        text ::= ([^<&] | entity)+
        entity ::= "&" ("lt" | "gt" | "amp" | "quot" | "#" [0-9]+) ";"
        comment ::= "<!--" ([^\x2d] | "-" [^\x2d])* "-->"
        name ::= [A-Za-z_] [A-Za-z0-9_.\x2d]*
        space ::= [ \t\n]+
        """,
        ['<note id="7"><to>Ada &amp; Bob</to><!-- kept short --><body lang="en">Come at five.</body><empty/></note>'],
    ),
    "lisp (lark)": (
        "lark",
        r"""
        start: form+
        ?form: "(" form* ")" | "'" form | SYMBOL | NUMBER | STRING
        SYMBOL: /[a-z+*\/<>=!?-][a-z0-9+*\/<>=!?-]*/
        NUMBER: /-?[0-9]+(\.[0-9]+)?/
        STRING: /"([^"\\\n]|\\.)*"/
        %import common.WS
        %ignore WS
        """,
        ['(define (fact n) (if (<= n 1) 1 (* n (fact (- n 1)))))\n(print "5! is" (fact 5) \'(a b c))'],
    ),
    "toml-like (ebnf)": (
        "ebnf",
        r"""
        root ::= (line? "\n")*
        line ::= "[" key ("." key)* "]" | key " = " value | "#" [^\n]*
        key ::= [A-Za-z0-9_\x2d]+
        value ::= string | number | "true" | "false" | "[" (value (", " value)*)? "]" | "{ " key " = " value (", " key " = " value)* " }"
        string ::= "\"" ([^"\\\n] | "\\" [nt"\\])* "\""
        number ::= [+\x2d]? ("0" | [1-9] [0-9]*) ("." [0-9]+)?
        """,
        ['# settings\n[server.http]\nhost = "127.0.0.1"\nport = 8080\nratios = [0.5, 1.25]\nlimits = { soft = 10, hard = 20 }\n\n'],
    ),
    "graphql (lark)": (
        "lark",
        r"""
        start: operation+
        operation: ("query" | "mutation")? NAME? variables? selection
        variables: "(" (VARIABLE ":" type ("=" value)?)+ ")"
        type: (NAME | "[" type "]") "!"?
        selection: "{" field+ "}"
        field: (NAME ":")? NAME arguments? directive* selection? | "..." NAME
        directive: "@" NAME arguments?
        arguments: "(" (NAME ":" value)+ ")"
        value: VARIABLE | NUMBER | STRING | "true" | "false" | "null" | NAME | "[" value* "]" | "{" (NAME ":" value)* "}"
        VARIABLE: /\$[A-Za-z_][A-Za-z0-9_]*/
        NAME: /[A-Za-z_][A-Za-z0-9_]*/
        NUMBER: /-?[0-9]+(\.[0-9]+)?/
        STRING: /"[^"\n]*"/
        %ignore /[ \t\n,]+/
        """,
        ['query Hero($id: ID!, $n: Int = 3) { hero(id: $id) { name friends(first: $n) @include(if: true) { name } } }'],
    ),
    "calls (ebnf)": (
        "ebnf",
        r"""
        root ::= call (";" " "? call)*
        call ::= ("get_weather" | "search" | "send_mail") "(" (argument (", " argument)*)? ")"
        argument ::= ("city" | "query" | "to" | "limit") "=" value
        value ::= "'" [^'\n]* "'" | [0-9]+ | "[" (value (", " value)*)? "]" | call
        """,
        ["get_weather(city='Oslo'); send_mail(to=['ada@example.com'], query=search(query='rain', limit=3))"],
    ),
    "regex: date": ("regex", r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", ["1999-12-31", "2024-02-29"]),
    "regex: .{0,500}": ("regex", ".{0,500}", ["Any text of moderate length, up to five hundred characters."]),
    "regex: words": ("regex", r"([A-Z][a-z]+ ){2,5}[A-Z][a-z]+\.", ["The Quick Brown Fox.", "Ada Lovelace Wrote Notes."]),
}  # fmt: skip


class Walker(Protocol):
    """One text under a grammar of some engine. ``fill`` returns whether ``token`` is allowed, timed by the caller."""

    def fill(self) -> None: ...

    def allows(self, token: int) -> bool: ...

    def accept(self, token: int) -> bool: ...

    def may_end(self) -> bool: ...


class Engine(Protocol):
    name: str

    def compile(self, kind: str, text: str, options: dict[str, str]) -> Callable[[], Walker]:
        """Raises ``Refused``."""
        ...


class Refused(Exception):
    pass


class Phloem:
    name = "phloem"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def compile(self, kind: str, text: str, options: dict[str, str]) -> Callable[[], Walker]:
        try:
            grammar = compile(kind, text, self.vocabulary, **options)
        except GrammarError as error:
            raise Refused(str(error)) from None
        return lambda: PhloemWalker(grammar.matcher(), self.vocabulary)


class PhloemWalker:
    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self.row = np.zeros(vocabulary.num_words, np.uint32)
        self.matcher = matcher
        self.accept = matcher.accept

    def fill(self) -> None:
        self.matcher.fill_mask(self.row)

    def allows(self, token: int) -> bool:
        return bool(int(self.row[token >> 5]) >> (token & 31) & 1)

    def may_end(self) -> bool:
        return self.matcher.is_accepting()


class Guidance:
    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self.lib = llguidance
        tokens = [t if t else b"\xff<special>" for t in tokenizer.token_bytes]
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_RawTokens(tokenizer, tokens))  # type: ignore[attr-defined]
        )
        self.num_words = (len(tokens) + 31) // 32
        self.eos = min(tokenizer.eos_ids)

    def compile(self, kind: str, text: str, options: dict[str, str]) -> Callable[[], Walker]:
        matcher = self.lib.LLMatcher
        make = {"json_schema": matcher.grammar_from_json_schema, "regex": matcher.grammar_from_regex, "lark": matcher.grammar_from_lark}  # fmt: skip
        if kind not in make:
            raise Refused(f"no {kind}")
        try:
            grammar = make[kind](text)
        except ValueError as error:
            raise Refused(str(error)) from None
        if matcher(self.tokenizer, grammar).is_error():
            raise Refused(matcher(self.tokenizer, grammar).get_error())
        return lambda: GuidanceWalker(matcher(self.tokenizer, grammar), self.num_words)


class _RawTokens:
    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = tokens
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


class GuidanceWalker:
    def __init__(self, matcher: Any, num_words: int) -> None:
        import llguidance.numpy

        self.fill_next = llguidance.numpy.fill_next_token_bitmask
        self.row = np.zeros((1, num_words), np.int32)
        self.matcher = matcher

    def fill(self) -> None:
        self.fill_next(self.matcher, self.row)

    def allows(self, token: int) -> bool:
        return bool(int(self.row[0, token >> 5]) >> (token & 31) & 1)

    def accept(self, token: int) -> bool:
        return self.matcher.consume_token(token)

    def may_end(self) -> bool:
        return self.matcher.is_accepting()


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self.lib = xgrammar
        info = xgrammar.TokenizerInfo(
            tokenizer.token_bytes, xgrammar.VocabType.RAW, stop_token_ids=sorted(tokenizer.eos_ids)
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.size = len(tokenizer.token_bytes)

    def compile(self, kind: str, text: str, options: dict[str, str]) -> Callable[[], Walker]:
        make = {"json_schema": self.compiler.compile_json_schema, "regex": self.compiler.compile_regex, "ebnf": self.compiler.compile_grammar}  # fmt: skip
        if kind not in make:
            raise Refused(f"no {kind}")
        try:
            grammar = make[kind](text)
        except RuntimeError as error:
            raise Refused(str(error)) from None
        return lambda: XGrammarWalker(self.lib, grammar, self.size)


class XGrammarWalker:
    def __init__(self, lib: Any, grammar: Any, size: int) -> None:
        self.matcher = lib.GrammarMatcher(grammar, terminate_without_stop_token=True)
        self.row = lib.allocate_token_bitmask(1, size)
        self.accept = self.matcher.accept_token

    def fill(self) -> None:
        self.matcher.fill_next_token_bitmask(self.row)

    def allows(self, token: int) -> bool:
        return bool(int(self.row[0, token >> 5]) >> (token & 31) & 1)

    def may_end(self) -> bool:
        return self.matcher.is_terminated()


@dataclass(slots=True)
class Tally:
    """Verdicts and times of one engine on one set of grammars. Times are of the thread, in microseconds."""

    verdicts: Counter[str] = field(default_factory=Counter)
    compile_us: list[float] = field(default_factory=list)
    first_us: list[float] = field(default_factory=list)
    seen_us: list[float] = field(default_factory=list)
    accept_us: list[float] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {
            "verdicts": dict(self.verdicts),
            "compile_ms": percentiles([t / 1e3 for t in self.compile_us]),
            "mask_first_us": percentiles(self.first_us),
            "mask_seen_us": percentiles(self.seen_us),
            "accept_us": percentiles(self.accept_us),
        }


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    data = np.array(values)
    found = {"mean": data.mean(), **{f"p{q}": np.percentile(data, q) for q in (50, 90, 99)}, "max": data.max()}
    return {name: round(float(value), 3) for name, value in found.items()}


def _clock_cost_ns() -> int:
    """What reading the thread's clock twice costs by itself (a system call): subtracted from every time."""
    clock = time.thread_time_ns
    pairs = [-(clock() - clock()) for _ in range(10_001)]
    return sorted(pairs)[5_000]


CLOCK_COST_NS = _clock_cost_ns()


def walk(make: Callable[[], Walker], tokens: list[int], masks_us: list[float], accepts_us: list[float]) -> bool:
    """Whether the engine takes the text: every token allowed by its mask, and the text may end."""
    clock = time.thread_time_ns
    walker = make()
    for token in tokens:
        begin = clock()
        walker.fill()
        masks_us.append((clock() - begin - CLOCK_COST_NS) / 1e3)
        if not walker.allows(token):
            return False
        begin = clock()
        walker.accept(token)
        accepts_us.append((clock() - begin - CLOCK_COST_NS) / 1e3)
    return walker.may_end()


Case = tuple[str, str, str, list[tuple[str, bool]]]  # name, kind, grammar, instances with their verdicts


def measure(
    engine: Engine, cases: Iterable[Case], encode: Callable[[str], list[int]], options: dict[str, str]
) -> Tally:
    tally = Tally()
    verdicts = tally.verdicts
    for name, kind, text, instances in cases:
        begin = time.thread_time_ns()
        try:
            make = engine.compile(kind, text, options if kind == "json_schema" else {})
        except Refused as refusal:
            if "no value satisfies" in str(refusal):
                wrong = [t for t, valid in instances if valid]
                verdicts["correct"] += len(instances) - len(wrong)
                verdicts["over"] += len(wrong)
                continue
            verdicts["refused grammars"] += 1
            verdicts["not run"] += len(instances)
            tally.refusals.append((name, str(refusal)))
            continue
        tally.compile_us.append((time.thread_time_ns() - begin) / 1e3)
        verdicts["grammars"] += 1
        right = True
        for instance, valid in instances:
            tokens = encode(instance)
            taken = walk(make, tokens, tally.first_us, tally.accept_us)
            walk(make, tokens, tally.seen_us, [])
            verdict = "correct" if taken == valid else "over" if valid else "under"
            verdicts[verdict] += 1
            if taken != valid:
                right = False
                tally.wrong.append((name, f"{verdict}: {instance[:80]}"))
        verdicts["grammars without a wrong verdict"] += right
    return tally


def bench_cases(path: Path, limit: int) -> Iterator[Case]:
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number >= limit:
                return
            entry = json.loads(line)
            yield entry["id"], "json_schema", entry["text"], [(t["text"], t["valid"]) for t in entry["tests"]]


def suite_cases(folder: Path) -> Iterator[Case]:
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            tests = [(json.dumps(t["data"], ensure_ascii=False), t["valid"]) for t in group["tests"]]
            yield f"{path.stem}: {group['description']}", "json_schema", json.dumps(group["schema"]), tests


def own_cases() -> Iterator[Case]:
    for name, (kind, text, instances) in GRAMMARS.items():
        yield name, kind, text, [(instance, True) for instance in instances]


def engines(tokenizer: Tokenizer, with_peers: bool) -> Iterator[Engine]:
    yield Phloem(tokenizer.vocabulary())
    for peer in (Guidance, XGrammar) if with_peers else ():
        try:
            yield peer(tokenizer)
        except ImportError:
            print(f"{peer.name}: not installed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="schemas and instances, one JSON a line")
    parser.add_argument("--suite", type=Path, help="folder of the JSON-Schema-Test-Suite")
    parser.add_argument("--model", default="smollm2", help="whose tokens (default: smollm2)")
    parser.add_argument("--order", default="any", choices=["any", "schema"], help="property order (default: any)")
    parser.add_argument("--limit", type=int, default=1 << 30, help="at most so many schemas of --data")
    parser.add_argument("--peers", action="store_true", help="measure llguidance and xgrammar too")
    parser.add_argument("--details", action="store_true", help="print every refusal and wrong verdict")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results/constrained.json")
    parser.add_argument(
        "--walks", type=int, default=0, help="so many random walks through each schema of --data instead"
    )
    parser.add_argument("--end-to-end", action="store_true", help="JSON answers of the model itself instead")
    parser.add_argument("--answers", type=int, default=300, help="so many answers of --end-to-end (default: 300)")
    args = parser.parse_args()
    if args.end_to_end:
        report = header() | measure_answers(args.model, answers=args.answers)
        print(json.dumps(report, indent=2))
        if args.save:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / "constrained_answers.json").write_text(json.dumps(report, indent=2) + "\n")
        return
    tokenizer = load_tokenizer(resolve_model(args.model))
    if args.walks:
        cases = ((name, text) for name, _, text, _ in bench_cases(args.data, args.limit))
        found = walk_schemas(tokenizer.vocabulary(), cases, args.walks, args.order)
        print("  ".join(f"{name} {count:,}" for name, count in sorted(found.items())))
        return
    sets: dict[str, tuple[list[Case], dict[str, str]]] = {"grammars of this file": (list(own_cases()), {})}
    if args.data:
        sets["data"] = list(bench_cases(args.data, args.limit)), {"property_order": args.order, "numbers": "any"}
    if args.suite:
        sets["suite"] = list(suite_cases(args.suite)), {"property_order": "any", "format": "annotate", "numbers": "any"}
    figures: dict[str, Any] = header()
    for engine in engines(tokenizer, args.peers):
        warm = engine.compile("regex", "[a-c]{2}", {})()  # the compiled walks are loaded here, not timed
        warm.fill()
        warm.accept(tokenizer.encode("a")[0])
        gc.collect()
        gc.disable()  # a server collects between steps, not within one
        for title, (cases, options) in sets.items():
            tally = measure(engine, cases, tokenizer.encode, options)
            report = tally.report()
            figures.setdefault(title, {})[engine.name] = report
            print(f"\n{engine.name}, {title}")
            for key, values in report.items():
                print(f"  {key:14}", "  ".join(f"{name} {value}" for name, value in values.items()))
            if args.details:
                for name, why in tally.refusals + tally.wrong:
                    print(f"    {name}: {why[:200]}")
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "constrained.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
