"""A small vocabulary with the difficult tokens of real ones, and functions that lead texts through grammars."""

import heapq
import json
import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from phloem.constrained import CompiledGrammar, Matcher, Vocabulary

WORDS = [
    b"  ", b"\n  ", b'"', b'{"', b'"}', b'":', b'": ', b'", "', b'","', b'":"', b'"]', b'"},{"', b"[]", b"{}", b"],",
    b"true", b"false", b"null", b"name", b"na", b"me", b"age", b"the", b" the", b" a", b"an", b"10", b"12", b"00",
    b"\\n", b"\\u00", b'\\"',
    b"\xc3\xa9", b"\xe2\x82", b"\xf0\x9f", b"a-", b"-a", b"aa", b"ab", b"ba", b"acc", b"return",
    b"return acc", b'." ', b'" and "', b"00-", b"-0", b".5", b"1.", b"}]}", b"}}", b"]]", b"'",
    b"x,", b", ", b" :", b"\t\t",
]  # fmt: skip


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """Every byte, some words, a word twice, an end token and a special one whose bytes look like text."""
    tokens = [bytes([b]) for b in range(256)] + WORDS + [b"the", b"</s>", b"{"]
    eos = len(tokens) - 2
    return Vocabulary(tokens, {eos, eos + 1}, eos)


def is_set(row: np.ndarray, token: int) -> bool:
    return bool(int(row[token >> 5]) >> (token & 31) & 1)


def encode(vocabulary: Vocabulary, text: str | bytes, rng: random.Random | None = None) -> list[int]:
    """Tokens that spell the text: the longest first, or any that fit."""
    data = text.encode() if isinstance(text, str) else text
    ids: list[int] = []
    at = 0
    candidates = [t for t in range(len(vocabulary)) if vocabulary.is_text[t]]
    while at < len(data):
        fits = [t for t in candidates if data.startswith(vocabulary.tokens[t], at)]
        ids.append(rng.choice(fits) if rng else max(fits, key=lambda t: len(vocabulary.tokens[t])))
        at += len(vocabulary.tokens[ids[-1]])
    return ids


def takes(grammar: CompiledGrammar, text: str | bytes, rng: random.Random | None = None) -> bool:
    """Whether the grammar accepts the whole text. Asserts that masks and ``accept`` agree at every token."""
    vocabulary = grammar.machine.vocabulary
    matcher = grammar.matcher()
    row = np.zeros(vocabulary.num_words, np.uint32)
    for token in encode(vocabulary, text, rng):
        matcher.fill_mask(row)
        allowed = is_set(row, token)
        assert matcher.accept(token) == allowed, (text, vocabulary.tokens[token], allowed)
        if not allowed:
            return False
    matcher.fill_mask(row)
    assert is_set(row, vocabulary.eos) == matcher.is_accepting()
    return matcher.is_accepting()


def wander(grammar: CompiledGrammar, rng: random.Random, *, most: int = 40) -> str:
    """A text made of random allowed tokens, then brought to its end by the shortest way there is."""
    vocabulary = grammar.machine.vocabulary
    matcher = grammar.matcher()
    out = b""
    for _ in range(rng.randrange(most)):
        allowed = [t for t in reachable(matcher) if t != vocabulary.eos]
        if not allowed:
            assert matcher.is_accepting(), f"dead end after {out!r}"
            return out.decode()
        token = rng.choice(allowed)
        assert matcher.accept(token), matcher.error
        out += vocabulary.tokens[token]
    return (out + completion(matcher)).decode()


def completion(matcher: Matcher) -> bytes:
    """Bytes that end the text, by a search that prefers low nesting. Without dead ends there always are some."""
    machine = matcher.grammar.machine
    start = matcher.state
    plain = bytes(b for b in range(0x20, 0x7F) if b != 0x5C) + b"\n\t\x80\x90\xa0\xbf"
    for alphabet in (plain, plain + b"\\", bytes(range(256))):
        met = {machine.place(start)[:3]: 1}  # a few texts of an item under way: some may repeat another item
        queue = [(0, 0, start, b"")]
        while queue and len(met) < 10_000:
            _, length, config, way = heapq.heappop(queue)
            if machine.may_end(config):
                return way
            for byte in alphabet:
                following = machine.advance(config, byte)
                place = machine.place(following)[:3] if following >= 0 else None
                if place is not None and met.get(place, 0) < 8:
                    met[place] = met.get(place, 0) + 1
                    depth = machine.stack_depths[place[2]]
                    heapq.heappush(queue, (depth, length + 1, following, way + bytes([byte])))
    raise AssertionError(f"no way on from {machine.place(start)}")


def mismatches(grammar: CompiledGrammar, matches: Callable[[str], bool], *, walks: int, seed: int = 0) -> list[str]:
    """The texts of ``walks`` random walks through ``grammar`` that ``matches`` refuses."""
    texts = [wander(grammar, random.Random(seed + i)) for i in range(walks)]
    return [text for text in texts if not matches(text)]


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def reachable(matcher: Matcher) -> Iterable[int]:
    row = matcher.mask()
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
