"""A small vocabulary that is as awkward as a real one, and the ways tests feed texts through grammars."""

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
    """Whether the grammar takes the whole text; masks and ``accept`` have to agree at every token."""
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


def wander(grammar: CompiledGrammar, rng: random.Random, *, most: int = 120) -> str:
    """A text made of random allowed tokens, brought to its end: first freely, then by the tokens that close."""
    vocabulary = grammar.machine.vocabulary
    matcher = grammar.matcher()
    closing = [t for t in range(len(vocabulary)) if vocabulary.is_text[t] and len(vocabulary.tokens[t]) == 1]
    rank = {t: i for i, t in enumerate(sorted(closing, key=lambda t: b'"}],0:tfn1{['.find(vocabulary.tokens[t]) % 300))}
    out = b""
    for step in range(most * 20):
        row = matcher.mask()
        if matcher.is_accepting() and (step >= most or rng.random() < 0.2):
            assert matcher.accept(vocabulary.eos)
            return out.decode()
        bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        allowed = [int(t) for t in bits if t != vocabulary.eos]
        if matcher.is_accepting() and not allowed:
            return out.decode()
        assert allowed, f"dead end after {out!r}"
        if step < most:
            token = rng.choice(allowed)
        else:
            singles = [t for t in allowed if t in rank] or allowed
            token = min(singles, key=lambda t: rank.get(t, 1000)) if rng.random() < 0.8 else rng.choice(singles)
        assert matcher.accept(token), matcher.error
        out += vocabulary.tokens[token]
    raise AssertionError(f"the walk never ends: {out[:200]!r}")


def walk_all(grammar: CompiledGrammar, matches: Callable[[str], bool], *, walks: int, seed: int = 0) -> None:
    for i in range(walks):
        text = wander(grammar, random.Random(seed + i))
        assert matches(text), text


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def reachable(matcher: Matcher) -> Iterable[int]:
    row = matcher.mask()
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
