"""What is derived at once equals what is derived with time, and what cannot be is left undone for then."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from phloem.constrained import Compiler, GrammarSpec, Vocabulary

ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 30},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "note": {"type": "string"},
        "kind": {"enum": ["person", "place", "thing"]},
        "size": {"type": "number", "minimum": 3, "maximum": 250},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "uniqueItems": True, "maxItems": 3},
        "inner": {"$ref": "#"},
    },
    "required": ["name", "code"],
    "additionalProperties": False,
}
WORDS = {"type": "string", "pattern": "^(\\S+ ){0,9}\\S+$", "maxLength": 60}
CASES = [
    ("json_schema", json.dumps(ORDER)),
    ("json_schema", json.dumps({"type": "array", "items": {"type": "string", "maxLength": 9}})),
    ("json_schema", json.dumps(WORDS)),
    ("json", ""),
    ("regex", "(ab|cd){3,9}[0-9]+ [a-z]{2,40}"),
    ("ebnf", 'root ::= "(" root ")" | [a-z]{1,9}'),
]


def walks(vocabulary: Vocabulary, kind: str, text: str, seed: int, *, max_tokens: int | None, length: int = 60) -> Any:
    """Random walks in step by two matchers of two machines: (one to derive ahead, the other, the next token)."""
    ahead, plain = (Compiler(vocabulary).compile(GrammarSpec(kind, text)) for _ in range(2))
    rng = random.Random(seed)
    for _ in range(8):
        one, other = ahead.matcher(max_tokens=max_tokens), plain.matcher(max_tokens=max_tokens)
        for _ in range(length):
            mask = other.mask()
            assert np.array_equal(one.mask(), mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            short = [token for token in allowed if len(vocabulary.tokens[token]) < 3 and token != vocabulary.eos]
            token = rng.choice(short or allowed)
            yield one, other, token
            assert one.accept(token) and other.accept(token), one.error
            assert one.must_end() == other.must_end() and one.is_accepting() == other.is_accepting()
            assert one.forced_tokens() == other.forced_tokens() and one.is_short == other.is_short
            if one.must_end() or token == vocabulary.eos:
                break


@pytest.mark.parametrize("max_tokens", [None, 70, 400])
@pytest.mark.parametrize(("kind", "text"), CASES)
def test_walks_that_are_prepared_at_once_equal_those_that_are_not(vocabulary, kind, text, max_tokens) -> None:
    done = asked = 0
    for one, _, token in walks(vocabulary, kind, text, 1, max_tokens=max_tokens):
        if one.knows((token,)):
            continue
        asked += 1
        if one.prepare_at_once((token,)):
            done += 1
            assert one.knows((token,))
    assert asked > 10
    assert done > asked // 4 or kind == "ebnf"  # its masks are never made at once


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_steps_at_once_equal_accepting_the_token(vocabulary, kind, text) -> None:
    told = 0
    for one, other, token in walks(vocabulary, kind, text, 2, max_tokens=None):
        step = one.grammar.step_at_once(one.state, token)
        if token == vocabulary.eos:
            assert step is None
        elif step is not None:
            told += 1
            one, other = one.clone(), other.clone()
            assert one.accept(token) and other.accept(token)
            assert step.state == one.state and np.array_equal(step.mask, other.mask())
            allowed = np.flatnonzero(np.unpackbits(other.mask().view(np.uint8), bitorder="little")).tolist()
            assert step.only_token == (allowed[0] if len(allowed) == 1 else -1)
            assert (step.only_token == vocabulary.eos) == other.must_end()
    assert told > 10


def test_nothing_is_derived_while_somebody_holds_the_machines_lock(vocabulary) -> None:
    grammar = Compiler(vocabulary).compile(GrammarSpec("json_schema", '{"type": "string", "maxLength": 20}'))
    matcher = grammar.matcher()
    quote, token = (next(i for i, text in enumerate(vocabulary.tokens) if text == byte) for byte in (b'"', b"q"))
    matcher.clone().prepare((quote,))
    assert matcher.accept(quote)
    with ThreadPoolExecutor(1) as another:
        with grammar.machine.lock:
            assert not another.submit(matcher.prepare_at_once, (token,)).result()
            assert another.submit(grammar.step_at_once, matcher.state, token).result() is None
        assert another.submit(matcher.prepare_at_once, (token,)).result()
    assert grammar.step_at_once(matcher.state, token) is not None


def test_an_ending_is_told_from_that_of_fewer_characters_only_where_the_string_may_end(vocabulary) -> None:
    """With 20 characters to come at least, the ending of one character more is not that of fewer."""
    schema = json.dumps({"type": "string", "minLength": 20, "maxLength": 24})
    grammar, plain = (Compiler(vocabulary).compile(GrammarSpec("json_schema", schema)) for _ in range(2))
    one, other = grammar.matcher(), plain.matcher()
    quote, letter = (next(i for i, text in enumerate(vocabulary.tokens) if text == byte) for byte in (b'"', b"q"))
    for token in (quote, *[letter] * 24):
        assert one.accept(token) and other.accept(token)
        one.mask()
        told = grammar.endings.knows_at_once(one.state)
        expected = plain.endings.of(other.state)
        if told:
            assert grammar.endings.of(one.state).word == expected.word
        assert grammar.endings.of(one.state).word == expected.word
        assert len(expected.word) == max(20 - (one.num_tokens - 1), 0) + 1
    assert told, "the ending after 20 characters tells those after more"
