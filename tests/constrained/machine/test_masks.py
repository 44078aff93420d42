import json
import random
import re

import numpy as np
import pytest
from phloem.constrained import Compiler, GrammarSpec, Vocabulary, compile

from ..conftest import encode, takes

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 3, "maximum": 120},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
)


def brute_force(vocabulary: Vocabulary, is_prefix, text: bytes) -> set[int]:
    return {t for t in range(len(vocabulary)) if vocabulary.is_text[t] and is_prefix(text + vocabulary.tokens[t])}


@pytest.mark.parametrize("kind", ["choices", "regex", "ebnf", "json_schema"])
def test_a_mask_is_what_trying_every_token_finds(vocabulary: Vocabulary, kind: str) -> None:
    """The oracle: a finite language, its prefixes listed, every token tried at every state of random walks."""
    words = ["a", "ab", "abba", "name", "na", "then", "the", "10", "00-", "é", "returned", "return acc", 'a"b', "a\\b"]
    if kind == "json_schema":
        texts = {json.dumps(w, ensure_ascii=False).encode() for w in words}
        grammar = compile(kind, json.dumps({"enum": words}), vocabulary, whitespace="compact")
    else:
        texts = {w.encode() for w in words}
        source = {
            "choices": json.dumps(words),
            "regex": "|".join(re.escape(w) for w in words),
            "ebnf": "root ::= " + " | ".join(json.dumps(w, ensure_ascii=False) for w in words),
        }[kind]
        grammar = compile(kind, source, vocabulary)
    prefixes = {t[:n] for t in texts for n in range(len(t) + 1)}
    rng = random.Random(0)
    for _ in range(300):
        matcher = grammar.matcher()
        text = b""
        while True:
            expected = brute_force(vocabulary, prefixes.__contains__, text)
            bits = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            assert set(bits.tolist()) - {vocabulary.eos} == expected, text
            assert matcher.is_accepting() == (text in texts)
            if not expected:
                break
            token = rng.choice(sorted(expected))
            assert matcher.accept(token)
            text += vocabulary.tokens[token]


def test_a_mask_is_the_same_after_the_caches_forgot_it(vocabulary: Vocabulary) -> None:
    grammar = compile("json_schema", SCHEMA, vocabulary)
    matcher = grammar.matcher()
    fresh = []
    for token in encode(vocabulary, '{"name": "the", "children": []}'):
        fresh.append(matcher.mask().copy())
        assert matcher.accept(token)
    grammar.machine.forget_edges()
    for cache in (grammar.masks.known, grammar.masks.inner):
        cache.young.clear()
        cache.old.clear()
    matcher = grammar.matcher()
    for token, mask in zip(encode(vocabulary, '{"name": "the", "children": []}'), fresh, strict=True):
        assert (matcher.mask() == mask).all()
        assert matcher.accept(token)


def fresh_compiler(vocabulary: Vocabulary) -> Compiler:
    """Its machines have derived nothing, and remember no failure."""
    return Compiler(Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos))


def test_a_mask_of_too_much_work_ends_its_own_text_alone(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = "(qa[0-9]x|qb[a-f]y|qc[g-k]z){1,3}"
    grammar = compile("regex", pattern, vocabulary)
    matcher, other = grammar.matcher(), grammar.matcher()
    assert matcher.accept(vocabulary.tokens.index(b"q"))
    with monkeypatch.context() as patched:
        patched.setattr("phloem.constrained.machine.masks.MASK_WORK", 3)
        allowed = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert matcher.error is not None and "at position 1" in matcher.error and "more than 3 steps" in matcher.error
    assert np.flatnonzero(allowed).tolist() == [vocabulary.eos]
    assert other.mask().any() and other.error is None
    again = grammar.matcher()  # gets to the same place, where no work is done twice
    assert again.accept(vocabulary.tokens.index(b"q")) and again.mask() is not None and again.error == matcher.error
    grammar = fresh_compiler(vocabulary).compile(GrammarSpec("regex", pattern))
    assert takes(grammar, "qa7xqbfy") and not takes(grammar, "qa7xqbgy")


def test_a_mask_that_nests_too_deep_ends_its_own_text_alone(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = fresh_compiler(vocabulary).compile(GrammarSpec("regex", "(qa[0-9]x|qb[a-f]y)z"))
    matcher, other = grammar.matcher(), grammar.matcher()
    assert other.mask().any() and matcher.accept(vocabulary.tokens.index(b"q"))

    def nest(*_: object) -> None:
        raise RecursionError

    with monkeypatch.context() as patched:
        patched.setattr(grammar.masks.walker, "from_state", nest)
        assert matcher.mask().any() and "nests too deep" in str(matcher.error)
    assert other.mask().any() and other.error is None


def test_branches_that_overlap_too_much_end_their_own_text_alone(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    branches = [{"properties": {"a": {"minimum": i}, "b": {"maximum": i}}, "required": ["a"]} for i in range(4)]
    schema = json.dumps({"type": "object", "oneOf": branches, "maxProperties": 5})
    options = {"property_order": "any"}
    grammar = fresh_compiler(vocabulary).compile(GrammarSpec("json_schema", schema, options))
    matcher, other = grammar.matcher(), grammar.matcher()
    for token in encode(vocabulary, '{"b":'):
        assert matcher.mask() is not None and matcher.accept(token)
    with monkeypatch.context() as patched:
        patched.setattr("phloem.constrained.machine.masks.MASK_WORK", 20)
        for token in encode(vocabulary, '3,"a":3}'):
            matcher.mask()
            if matcher.error is not None or not matcher.accept(token):
                break
    assert matcher.error is not None and "more than 20 steps" in matcher.error
    assert other.mask().any() and other.error is None
    grammar = fresh_compiler(vocabulary).compile(GrammarSpec("json_schema", schema, options))
    assert takes(grammar, '{"b":3,"a":3}') and not takes(grammar, '{"b":1,"a":3}')


def test_the_only_token_is_the_one_that_the_mask_allows(vocabulary: Vocabulary) -> None:
    grammar = compile("regex", "q(x|y)", vocabulary)
    masks, after_q = grammar.masks, grammar.machine.advance(grammar.start, ord("q"))
    assert masks.only_token(grammar.start) == ord("q") and masks.only_token(after_q) == -1
    assert masks.only_token(grammar.machine.advance(after_q, ord("x"))) == vocabulary.eos


def test_stacks_that_agree_as_deep_as_was_looked_share_a_mask(vocabulary: Vocabulary) -> None:
    grammar = compile("json", "", vocabulary)
    masks = []
    for depth in (5, 6, 30):
        config = grammar.machine.advance_bytes(grammar.start, b"[" * depth + b"1")
        masks.append(grammar.masks.of(config))
    assert masks[0] is masks[1] is masks[2]


def test_a_name_beside_any_other_name_has_the_mask_that_trying_every_token_finds(vocabulary: Vocabulary) -> None:
    properties = {"name": {"type": "integer"}, "na": {"const": "a"}, "the": True, "an a": {"type": "object"}, "é": {}}
    schema = json.dumps({"properties": properties, "required": ["the"]})
    grammar = compile("json_schema", schema, vocabulary, property_order="any", whitespace="flexible")
    machine, masks = grammar.machine, grammar.masks
    for text in ('{"', '{"n', '{"na', '{"name', '{"x', '{"an ', '{"the": {"name": 1}, "n'):
        config = machine.advance_bytes(grammar.start, text.encode())
        bits = np.unpackbits(masks.of(config).view(np.uint8), bitorder="little")
        for token in np.flatnonzero(vocabulary.is_text).tolist():
            assert bool(bits[token]) == (machine.advance(config, token) >= 0), (text, vocabulary.tokens[token])


def test_masks_stay_right_and_shared_when_there_is_room_for_few(vocabulary: Vocabulary) -> None:
    grammar = fresh_compiler(vocabulary).compile(GrammarSpec("json_schema", SCHEMA))
    kept = grammar.masks.kept
    text = '{"name": "the", "age": 10, "children": [{"name": "a"}, {"name": "aa", "age": 4}]}'
    before, held = [], []
    for room in (kept.capacity, 3):
        kept.capacity = room
        kept.clear()
        grammar.masks.known.young.clear()
        matcher = grammar.matcher()
        for at, token in enumerate(encode(vocabulary, text)):
            mask = matcher.mask()
            assert mask is matcher.mask() and not mask.flags.writeable
            held.append((mask, mask.copy()))
            if room > 3:
                before.append(mask.copy())
            assert (mask == before[at]).all()
            assert matcher.accept(token)
        assert len(kept.rows) <= room
    assert all((mask == copy).all() for mask, copy in held)  # also those that were forgotten
