"""Random texts from a schema's masks: random tokens for a while, then the shortest completion that a search finds.

Every token passes the mask, those of the completion too. A completion that the search does not find is taken from the
grammar's ``endings``. So the walk finds masks that forbid a token of a valid completion, and masks that allow a token
after which no completion exists. ``walk_schemas`` also gives each text to ``jsonschema``.
"""

import heapq
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from phloem.constrained import CompiledGrammar, GrammarError, Matcher, Vocabulary, compile
from phloem.constrained.machine import Machine
from phloem.constrained.machine.walk import ENDS

from . import percentiles

PLAIN = bytes([*range(0x21, 0x5C), *range(0x5D, 0x7F), 0x20, 0x09, 0x0A, 0x80, 0x90, 0xA0, 0xBF])
ALPHABETS = (PLAIN, PLAIN + b"\\")  # tried one after the other for the next bytes of a completion
UNHEARD_OF = b'"no such property":'
MAX_TRIED = 20_000  # configurations that the search for the next step of a completion visits
OWN_WAYS = 60  # steps of a completion that are searched for here
MAX_TOKENS = 6_000
SLOW_MASK_MS = 10
WANDERS = (5, 30, 120)  # random tokens of a text at most, one of these


class RandomTexts:
    """Random texts of one JSON grammar. ``names``: the property names that the grammar may require."""

    def __init__(self, grammar: CompiledGrammar, names: Iterable[str]) -> None:
        self.grammar = grammar
        self.vocabulary = grammar.machine.vocabulary
        self.names = [json.dumps(name, ensure_ascii=False).encode() + b":" for name in names]
        tokens = self.vocabulary.tokens
        self.ids = {tokens[t]: t for t in range(len(tokens) - 1, -1, -1) if self.vocabulary.is_text[t]}
        self.longest = min(16, max(map(len, self.ids)))

    def draw(self, rng: random.Random, *, matcher: Matcher | None = None, most: int = 30) -> tuple[str, str | None]:
        """(a text, None), or (the text so far, the reason why it is not a complete text of the grammar).

        ``most`` bounds the random tokens. ``matcher``: a new one of the grammar, to take the tokens.
        """
        matcher = matcher or self.grammar.matcher()
        out = bytearray()
        problem = self._wander(matcher, rng, out, most) or self._finish(matcher, out)
        return out.decode(errors="replace"), problem

    def _wander(self, matcher: Matcher, rng: random.Random, out: bytearray, most: int) -> str | None:
        for _ in range(rng.randrange(most)):
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            if matcher.error is not None or not len(allowed):
                return matcher.error or "dead end"
            token = int(allowed[rng.randrange(len(allowed))])
            if token == self.vocabulary.eos:
                return None
            if not matcher.accept(token):
                return f"allowed but refused: {matcher.error}"
            out += self.vocabulary.tokens[token]
        return None

    def _finish(self, matcher: Matcher, out: bytearray) -> str | None:
        """The nearest ways on, one after the other: each may lead to a value that does not end the text, as a short
        property name where a long one is missing. So after ``OWN_WAYS`` of them the grammar's own ending is taken.
        """
        machine = self.grammar.machine
        for done in range(MAX_TOKENS):
            if matcher.is_accepting():
                return None
            try:
                alphabets = ALPHABETS if done < OWN_WAYS else ()
                ways = (self._way_on(machine, matcher.state, alphabet) for alphabet in alphabets)
                way = next((way for way in ways if way), None)
                if way is None and (ending := self.grammar.endings.of(matcher.state)) is not None:
                    way = ending.word
            except GrammarError as error:
                return str(error)
            if way is None:
                return "no way on found"
            at = 0
            while at < len(way):
                length = next(n for n in range(self.longest, 0, -1) if way[at : at + n] in self.ids)
                token = self.ids[way[at : at + length]]
                mask = matcher.mask()
                if matcher.error is not None:
                    return matcher.error
                if not int(mask[token >> 5]) >> (token & 31) & 1 or not matcher.accept(token):
                    return f"{self.vocabulary.tokens[token]!r} can be completed but is not allowed"
                at += length
            out += way
        return "unfinished"

    def _way_on(self, machine: Machine, start: int, alphabet: bytes) -> bytes | None:
        """The bytes to the end of the text, out of the current value, or to a property that may be required."""

        def depth_of(config: int) -> int:
            return machine.stack_depths[machine.place(config)[2]]

        start_depth = depth_of(start)
        heap = [(start_depth, 0, start, b"")]
        seen = {start}
        while heap and len(seen) < MAX_TRIED:
            depth, length, config, way = heapq.heappop(heap)
            if way and (depth < start_depth or machine.may_end(config)):
                return way
            spaces = machine.spaces_before(config)
            is_before_name = not way or way[-1:] in b"{, \n\t"
            if is_before_name and not spaces and machine.advance_bytes(config, b"}") < 0:
                any_other = machine.advance_bytes(config, UNHEARD_OF)
                for name in self.names:
                    if machine.advance_bytes(config, name) not in (-1, any_other):
                        self.names.remove(name)  # try this name last next time
                        self.names.append(name)
                        return way + name
            for byte in (*self._bytes_of(machine, machine.place(config)[0], alphabet), *spaces):
                following = machine.advance_bytes(config, bytes([byte]))
                if following >= 0 and following not in seen:
                    seen.add(following)
                    heapq.heappush(heap, (depth_of(following), length + 1, following, way + bytes([byte])))
        return None

    @staticmethod
    def _bytes_of(machine: Machine, state: int, alphabet: bytes) -> list[int]:
        """One byte for each transition of a state; all digits, where items that are numbers have to differ."""
        row = machine.row(state)
        found = {int(row[byte]): byte for byte in reversed(alphabet) if row[byte] > 0}
        digits = [byte for byte in b"0123456789" if row[byte] > 0] if machine.item_readers else []
        return [*dict.fromkeys((*found.values(), *digits)), *(b",]} \n" if machine.arrays[ENDS][state] else b"")]


def property_names(schema: Any) -> list[str]:
    """The property names in a schema; names in lists that may require them come first."""
    return list(dict.fromkeys((*_required(schema), *_described(schema))))


def _required(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("required", "dependentRequired", "dependencies"):
                yield from _strings(value)
            yield from _required(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _required(value)


def _described(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "properties" and isinstance(value, dict):
                yield from value
            yield from _described(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _described(value)


def _strings(value: Any) -> Iterator[str]:
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(inner, str):
            yield inner
        else:
            yield from _strings(inner)


class TimedMatcher(Matcher):
    """Notes the thread's time of each mask and accept."""

    __slots__ = ("accepts_us", "masks_us")

    def __init__(self, grammar: CompiledGrammar) -> None:
        super().__init__(grammar)
        self.masks_us: list[float] = []
        self.accepts_us: list[float] = []

    def mask(self) -> np.ndarray:
        begin = time.thread_time_ns()
        row = super().mask()
        self.masks_us.append((time.thread_time_ns() - begin) / 1e3)
        return row

    def accept(self, token_id: int) -> bool:
        begin = time.thread_time_ns()
        taken = super().accept(token_id)
        self.accepts_us.append((time.thread_time_ns() - begin) / 1e3)
        return taken


def walk_schemas(vocabulary: Vocabulary, cases: Iterable[tuple[str, str]], walks: int, order: str) -> dict[str, Any]:
    """Draw texts of every schema (name, text), and print each text that ``jsonschema`` refuses. The counts of what was
    found, and the times of compiles and masks; every mask of a text counts, also those that were made before."""
    import jsonschema

    found: Counter[str] = Counter()
    compiles_ms: list[float] = []
    masks_ms: list[tuple[float, str]] = []
    for name, text in cases:
        begin = time.thread_time_ns()
        try:
            grammar = compile("json_schema", text, vocabulary, property_order=order, format="annotate")
        except GrammarError as error:
            found["schemas refused"] += 1
            print(f"    {name}: refused: {str(error)[:200]}")
            continue
        compiles_ms.append((time.thread_time_ns() - begin) / 1e6)
        found["schemas"] += 1
        schema = json.loads(text)
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
        texts = RandomTexts(grammar, property_names(schema))
        rng = random.Random(name)
        for number in range(walks):
            matcher = TimedMatcher(grammar)
            result, problem = texts.draw(rng, matcher=matcher, most=WANDERS[number % len(WANDERS)])
            masks_ms += [(us / 1e3, name) for us in matcher.masks_us]
            found["walks"] += 1
            if problem is None:
                value, has_twins = read_value(result)
                try:
                    problem = "invalid" if not validator.is_valid(value) else None
                except (RecursionError, jsonschema.exceptions._WrappedReferencingError, re.error):
                    problem = "the reference fails"
                if problem == "invalid" and has_twins:
                    problem = "names written twice"
            found[problem or "valid"] += 1
            if problem is not None:
                print(f"    {name}: {problem}: {' '.join(result.split())[:300]}")
    return {
        **dict(sorted(found.items())),
        "compile_ms": percentiles(compiles_ms),
        "mask_ms": percentiles([ms for ms, _ in masks_ms]),
        f"schemas with a mask above {SLOW_MASK_MS} ms": sorted({name for ms, name in masks_ms if ms > SLOW_MASK_MS}),
        "longest masks": [f"{name} {ms:.1f} ms" for ms, name in sorted(masks_ms, reverse=True)[:5]],
    }


def read_value(text: str, parse_float: Callable[[str], Any] = float) -> tuple[Any, bool]:
    """The JSON value, and whether an object has a name twice: grammars only track names that a keyword has."""
    twins = False

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twins
        twins = twins or len({name for name, _ in found}) < len(found)
        return dict(found)

    return json.loads(text, parse_float=parse_float, object_pairs_hook=pairs), twins
