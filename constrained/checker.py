"""A grammar checked before it is served: alternatives that overlap, dead rules, mask sizes, cost, and example texts."""

import json
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import numpy as np

from .code_points import union
from .compiler import MAX_TEXT_BYTES, Compiler
from .ebnf import read_ebnf, rules_used
from .grammar import CompiledGrammar
from .json import Document
from .lark_grammar import read_lark
from .machine import MASK_WORK
from .regex_syntax import alternatives
from .spec import GrammarError, GrammarKind, GrammarSpec
from .vocabulary import Vocabulary

MAX_PAIRS = 2_000  # pairs compared
MAX_REPEAT = 200  # patterns with longer repeats have too many states for interegular
MAX_PARTS = 200  # rules or subschemas that are compiled one by one
WALK_STEPS = 240
SHOWN_TOKENS = 8
# Schemas below these keywords may forbid something on purpose; a property may have the same name.
FORBIDDING = re.compile(r"(?<!/properties)(?<!/\$defs)(?<!/definitions)/(not|if|then|else)(?=/|$)")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two parts that a text can match both of: which of them it was is ambiguous, and following both costs time."""

    first: str
    second: str
    example: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an example text is accepted; if not, how many characters were ``taken`` and what is ``expected`` next."""

    text: str
    accepted: bool
    taken: int
    expected: str


@dataclass(frozen=True, slots=True)
class LimitUse:
    """How much of a limit the grammar used, in compiling and in a random walk of ``WALK_STEPS`` tokens."""

    name: str
    used: int
    most: int


@dataclass(frozen=True, slots=True)
class GrammarReport:
    """What ``check`` found. ``str`` is the text that ``phloem grammar`` prints."""

    spec: GrammarSpec
    overlaps: tuple[Overlap, ...]
    not_compared: tuple[str, ...]  # parts that interegular cannot read, each with the reason
    dead: tuple[str, ...]  # parts that no text can match
    unused: tuple[str, ...]  # rules and terminals that the start never reaches
    unchecked: tuple[str, ...]  # what the grammar leaves to be checked afterwards
    num_tokens: int  # tokens of the vocabulary
    first_tokens: tuple[bytes, ...]  # those that may come first, in the order of the vocabulary
    may_be_empty: bool
    compile_s: float
    mask_s: tuple[float, ...]  # times of the masks met on the random walk, ascending
    limits: tuple[LimitUse, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def is_accepting(self) -> bool:
        """Whether every example text is accepted."""
        return all(verdict.accepted for verdict in self.verdicts)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def check(
    kind: GrammarKind,
    text: str,
    vocabulary: Vocabulary | None = None,
    *,
    texts: Iterable[str] = (),
    **options: str | int | bool,
) -> GrammarReport:
    """Compile a grammar as ``compile`` does, on a machine of its own, and report what serving it would meet.

    Without a vocabulary every byte is a token. ``texts`` are examples to be judged: JSON in any white space, unless
    the option ``whitespace`` is given. Raises ``GrammarError``.
    """
    vocabulary = byte_vocabulary() if vocabulary is None else vocabulary
    spec = GrammarSpec(kind, text, options)
    Compiler(vocabulary).compile(GrammarSpec("lark", 'start: "a"'))  # loads the compiled walks and Lark
    compiler = Compiler(vocabulary)
    begin = time.perf_counter()
    grammar = compiler.compile(spec)
    compile_s = time.perf_counter() - begin
    machine = grammar.machine
    allowed = np.flatnonzero(np.unpackbits(grammar.matcher().mask().view(np.uint8), bitorder="little"))
    times, work = _walk(grammar)
    limits = (
        LimitUse("characters of grammar", len(text), MAX_TEXT_BYTES),
        LimitUse("automaton states", machine.num_states, machine.hard_limit),
        LimitUse("expressions", len(machine.expressions.nodes), machine.expressions.max_expressions),
        LimitUse("work of one mask", work, MASK_WORK),
    )
    overlaps, not_compared = _overlaps(spec)
    dead, unused = _dead_and_unused(spec, compiler)
    judging = grammar
    if kind in ("json", "json_schema", "structural_tags"):
        judging = compiler.compile(GrammarSpec(kind, text, {"whitespace": "flexible", **options}))
    return GrammarReport(
        spec,
        overlaps,
        not_compared,
        dead,
        unused,
        grammar.unchecked,
        int(vocabulary.is_text.sum()),
        tuple(vocabulary.tokens[t] for t in allowed if t != vocabulary.eos),
        machine.may_end(grammar.start),
        compile_s,
        times,
        limits,
        tuple(_judge(judging, each) for each in texts),
    )


def byte_vocabulary() -> Vocabulary:
    """A token for each byte, and an end token."""
    return Vocabulary([*(bytes([b]) for b in range(256)), b""], {256}, 256)


# -- overlaps ---------------------------------------------------------------------------------------------------------


def _overlaps(spec: GrammarSpec) -> tuple[tuple[Overlap, ...], tuple[str, ...]]:
    match spec.kind:
        case "choices":
            choices = json.loads(spec.text)
            pairs = ((a, b) if len(a) <= len(b) else (b, a) for a, b in combinations(choices, 2))
            return tuple(Overlap(a, b, a) for a, b in pairs if b.startswith(a))[:MAX_PAIRS], ()
        case "regex":
            groups = [{part: part for part in group} for group in alternatives(spec.text)]
        case "lark":
            loaded = read_lark(spec.text, start=str(spec.options.get("start", "start")))
            groups = [{f"{t.name} /{t.pattern.to_regexp()}/": t.pattern.to_regexp() for t in loaded.terminals}]
        case _:
            return (), ()
    not_compared: list[str] = []
    compared = (pair for group in groups for pair in _common_texts(group, not_compared))
    found = [Overlap(a, b, example) for a, b, example in islice(compared, MAX_PAIRS) if example is not None]
    if next(compared, None) is not None:
        not_compared.append(f"more than {MAX_PAIRS:,} pairs; the rest")
    return tuple(found), tuple(not_compared)


def _common_texts(patterns: dict[str, str], not_compared: list[str]) -> Iterator[tuple[str, str, str | None]]:
    """Each pair of patterns, by their labels, and a text that matches both; None if there is none."""
    from interegular import Comparator, InvalidSyntax, Unsupported, parse_pattern

    parsed: dict[str, Any] = {}
    for label, pattern in patterns.items():
        longest = max((int(n) for found in re.findall(r"\{(\d+)|,(\d+)\}", pattern) for n in found if n), default=0)
        try:
            if longest > MAX_REPEAT:
                raise Unsupported(f"a repeat of {longest:,} is above {MAX_REPEAT}")
            regex = parse_pattern(pattern.removeprefix("^").removesuffix("$"))
            regex.to_fsm()
            parsed[label] = regex
        except (Unsupported, InvalidSyntax) as error:
            not_compared.append(f"{label}: {error or 'interegular cannot read it'}")
    comparator = Comparator(parsed)
    for first, second in combinations(parsed, 2):
        is_apart = comparator.isdisjoint(first, second)
        yield first, second, None if is_apart else comparator.get_example_overlap(first, second).main_text


# -- rules that match nothing -----------------------------------------------------------------------------------------


def _dead_and_unused(spec: GrammarSpec, compiler: Compiler) -> tuple[tuple[str, ...], tuple[str, ...]]:
    def is_dead(text: str, options: Mapping[str, str | int | bool]) -> bool:
        """Whether no text matches; a part that is refused for another reason was served as part of the whole."""
        try:
            compiler.compile(GrammarSpec(spec.kind, text, dict(options)))
        except GrammarError as error:
            return str(error).startswith("no ")
        return False

    start = str(spec.options.get("start", "root" if spec.kind == "ebnf" else "start"))
    match spec.kind:
        case "regex":
            parts = list(dict.fromkeys(part for group in alternatives(spec.text) for part in group))[:MAX_PARTS]
            return tuple(part for part in parts if is_dead(part, {})), ()
        case "ebnf":
            rules = read_ebnf(spec.text)
            used = rules_used(rules, start)
            names: Sequence[str] = [name for name in rules if name in used]
            unused = [name for name in rules if name not in used]
        case "lark":
            loaded = read_lark(spec.text, start=start)
            names = list(dict.fromkeys(r.origin.name for r in loaded.rules if not r.origin.name.startswith("_")))
            kept = {*names, *(r.origin.name for r in loaded.rules), *(t.name for t in loaded.terminals)}
            unused = [name for name in loaded.defined if name not in kept and "__" not in name]
        case "json_schema":
            schema = json.loads(spec.text)
            if not isinstance(schema, dict) or "$id" in schema:  # another $id would change what references mean
                return (), ()
            defs = {"checked": {**schema, "$id": "urn:phloem:checked"}}
            pointers = [place.pointer for place in Document(schema).places[1:] if not FORBIDDING.search(place.pointer)]
            wholes = (json.dumps({"$ref": f"urn:phloem:checked{p}", "$defs": defs}) for p in pointers[:MAX_PARTS])
            return tuple(p for p, whole in zip(pointers, wholes, strict=False) if is_dead(whole, spec.options)), ()
        case _:
            return (), ()
    dead = [name for name in names[:MAX_PARTS] if is_dead(spec.text, {"start": name})]
    return tuple(dead), tuple(unused)


# -- cost and examples ------------------------------------------------------------------------------------------------


def _walk(grammar: CompiledGrammar) -> tuple[tuple[float, ...], int]:
    """The seconds of each mask met on a random walk, ascending, and the most work that one of them took."""
    rng = random.Random(0)
    fuel, eos = grammar.machine.fuel, grammar.machine.vocabulary.eos
    matcher = grammar.matcher()
    times: list[float] = []
    most = 0
    for _ in range(WALK_STEPS):
        before, begin = fuel.spent, time.perf_counter()
        mask = matcher.mask()
        times.append(time.perf_counter() - begin)
        most = max(most, fuel.spent - before)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        if token == eos or not matcher.accept(token):
            matcher = grammar.matcher()
    return tuple(sorted(times)), most


def _judge(grammar: CompiledGrammar, text: str) -> Verdict:
    machine, config = grammar.machine, grammar.start
    data = text.encode(errors="surrogatepass")
    taken = len(data)
    for at, byte in enumerate(data):
        following = machine.advance_bytes(config, bytes([byte]))
        if following < 0:
            taken = at
            break
        config = following
    accepted = taken == len(data) and machine.may_end(config)
    expected = "" if accepted else _expected(grammar, config)
    return Verdict(text, accepted, len(data[:taken].decode(errors="ignore")), expected)


def _expected(grammar: CompiledGrammar, config: int) -> str:
    """The bytes that may follow, as ranges of characters."""
    machine = grammar.machine
    allowed = [b for b in range(256) if machine.advance_bytes(config, bytes([b])) >= 0]
    ranges = union((b, b) for b in allowed if b < 0x80)
    shown = [repr(chr(a)) if a == b else f"{chr(a)!r} to {chr(b)!r}" for a, b in ranges]
    if machine.may_end(config):
        shown.append("the end")
    if allowed and allowed[-1] >= 0x80:
        shown.append("a character beyond ASCII")
    return ", ".join(shown)


# -- the report as text -----------------------------------------------------------------------------------------------


def _lines(report: GrammarReport) -> Iterator[str]:
    spec = report.spec
    yield f"{spec.kind}: compiled in {1e3 * report.compile_s:.1f} ms"
    shown = " ".join(ascii(t.decode(errors="backslashreplace")) for t in report.first_tokens[:SHOWN_TOKENS])
    more = " ..." if len(report.first_tokens) > SHOWN_TOKENS else ""
    end = "; the text may be empty" if report.may_be_empty else ""
    yield f"first mask: {len(report.first_tokens):,} of {report.num_tokens:,} tokens: {shown}{more}{end}"
    middle, slowest = report.mask_s[len(report.mask_s) // 2], report.mask_s[-1]
    yield f"masks of {len(report.mask_s)} random steps: median {1e6 * middle:.0f} us, slowest {1e3 * slowest:.1f} ms"
    for limit in report.limits:
        share = limit.used / limit.most
        warning = "  <- near the limit" if share > 0.5 else ""
        yield f"  {limit.name}: {limit.used:,} of {limit.most:,} ({share:.1%}){warning}"
    for title, parts in (
        ("left to be checked afterwards", report.unchecked),
        ("matches no text", report.dead),
        ("never used", report.unused),
    ):
        yield from (f"{title}: {part}" for part in parts)
    for o in report.overlaps:
        if spec.kind == "choices" and o.first != o.second:
            yield f"overlap: {o.first!r} begins {o.second!r}"
        else:
            yield f"overlap: {o.first} overlaps with {o.second}; both match {o.example!r}"
    yield from (f"not compared: {part}" for part in report.not_compared)
    if spec.kind in ("regex", "choices", "lark") and not report.overlaps and not report.not_compared:
        yield "overlaps: none"
    for v in report.verdicts:
        where = f"stops after {v.taken} of {len(v.text)} characters" if v.taken < len(v.text) else "is not complete"
        yield f"accepted: {v.text!r}" if v.accepted else f"refused: {v.text!r} {where}; expected {v.expected}"
