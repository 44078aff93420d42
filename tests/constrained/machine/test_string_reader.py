import json
import random

import numpy as np
import pytest
from phloem.constrained import CompiledGrammar, Vocabulary, compile
from phloem.constrained.json import scalars
from phloem.constrained.machine import Masks, StringText
from phloem.constrained.machine import string_reader as module
from phloem.constrained.machine.joint_sets import JointSets
from phloem.constrained.machine.part_sets import PartSets
from phloem.constrained.machine.string_reader import StringReader

SCHEMAS = [
    {"pattern": r"^(\S+\s+){0,49}\S+$", "maxLength": 60},
    {"pattern": r"^([^\n]{0,20}\n){0,20}[^\n]{0,40}$"},
    {"pattern": r"^([a-zé]+[,; -]?){3,30}$", "minLength": 12, "maxLength": 400},
    {"pattern": "[a-zé]{3}[^0-9]*$", "minLength": 9},
    {"pattern": "^[a-zé ]*$", "minLength": 5, "not": {"pattern": "the"}},
    {"oneOf": [{"pattern": "^[a-z]{1,20}(-[a-z]+){0,30}$"}, {"pattern": r"\.[a-z]{1,7}\.|na"}, {"maxLength": 12}]},
    {"if": {"pattern": "^[a-m]"}, "then": {"pattern": "^[a-zé]{1,8}(-[a-z]+){0,13}$"}, "else": {"maxLength": 40}},
]  # fmt: skip


def grammar_of(vocabulary: Vocabulary, schema: dict[str, object]) -> CompiledGrammar:
    vocabulary = Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos)
    items = {"type": "string", **schema}
    return compile("json_schema", json.dumps({"type": "array", "items": items, "maxItems": 3}), vocabulary)


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_token_leads_to_what_its_bytes_lead_to(
    vocabulary: Vocabulary, schema: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalars, "MOST_COUNTED_WHOLE", -1)  # no string's states are made as a whole
    monkeypatch.setattr(Masks, "prepare", lambda masks, code: None)  # nor ahead of time
    read, found = StringReader.read, []
    monkeypatch.setattr(StringReader, "read", lambda *args: found.append(read(*args)) or found[-1])
    grammar = grammar_of(vocabulary, schema)
    machine, masks = grammar.machine, grammar.masks
    rng = random.Random(str(schema))
    for _ in range(12):
        matcher = grammar.matcher()
        assert matcher.accept(ord("[")) and matcher.accept(ord('"'))
        for _ in range(14):
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            if matcher.is_accepting():
                break
            words = [t for t in allowed.tolist() if len(vocabulary.tokens[t]) > 1]
            tokens = rng.sample(words, min(5, len(words))) or [rng.choice(allowed.tolist())]
            for token, one in [(token, machine.advance(matcher.state, token)) for token in tokens]:
                other = matcher.state
                for byte in vocabulary.tokens[token]:
                    other = machine.advance_bytes(other, bytes([byte]))
                assert one >= 0 and other >= 0
                assert machine.place(one)[1:] == machine.place(other)[1:]
                assert np.array_equal(masks.of(one), masks.of(other))
            assert matcher.accept(tokens[0])
    assert any(size for size, _, _ in found)


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_token_is_refused_where_a_byte_is(
    vocabulary: Vocabulary, schema: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalars, "MOST_COUNTED_WHOLE", -1)
    grammar = grammar_of(vocabulary, schema)
    machine, rng = grammar.machine, random.Random(str(schema))
    tokens = [t for t in range(len(vocabulary)) if vocabulary.is_text[t]]
    matcher = grammar.matcher()
    while not matcher.is_accepting():
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        for token in tokens:
            other = matcher.state
            for byte in vocabulary.tokens[token]:
                other = other if other < 0 else machine.advance_bytes(other, bytes([byte]))
            assert (machine.advance(matcher.state, token) < 0) == (other < 0)
        assert matcher.accept(rng.choice(allowed.tolist()))


def begun(grammar: CompiledGrammar) -> tuple[int, StringText]:
    """The state after the quote of the first string, and its text."""
    machine = grammar.machine
    state = machine.place(machine.advance_bytes(grammar.start, b'["'))[0]
    machine.settle(state)
    return state, machine.string_texts[state]


def walk_all(part_sets: PartSets, vocabulary: Vocabulary, text: StringText) -> None:
    needs = np.zeros(32 * vocabulary.num_words, np.uint16) if text.is_counted else None
    part_sets.walk(vocabulary.trie, text, np.zeros(vocabulary.num_words, np.uint32), needs)


def test_a_text_whose_parts_are_not_known_is_not_read(vocabulary: Vocabulary) -> None:
    grammar = grammar_of(vocabulary, SCHEMAS[3])
    state, text = begun(grammar)
    part_sets = PartSets(grammar.machine.expressions)
    reader = StringReader(grammar.machine.expressions, part_sets, JointSets(part_sets))
    assert reader.read(state, text, b"abcd") == (0, 0, state)
    walk_all(part_sets, vocabulary, text)
    assert reader.read(state, text, b'abcd"')[0] == 4
    assert reader.read(state, text, b"a") == (0, 0, state)


def test_rules_are_made_after_some_texts_that_lacked_them(vocabulary: Vocabulary) -> None:
    grammar = grammar_of(vocabulary, SCHEMAS[3])
    state, text = begun(grammar)
    part_sets = PartSets(grammar.machine.expressions)
    reader = StringReader(grammar.machine.expressions, part_sets, JointSets(part_sets))
    sizes = [reader.read(state, text, b"abcd")[0] for _ in range(module.MOST_UNREAD + 1)]
    assert sizes == [0] * module.MOST_UNREAD + [4]


def test_known_texts_are_bounded(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 4)
    grammar = grammar_of(vocabulary, SCHEMAS[0])
    state, text = begun(grammar)
    part_sets = PartSets(grammar.machine.expressions)
    walk_all(part_sets, vocabulary, text)
    reader = StringReader(grammar.machine.expressions, part_sets, JointSets(part_sets))
    for data in (b"ab", b"cd", b"the name", b"x y", b"ab cd", b"ab"):
        size, count, after = reader.read(state, text, data)
        assert (size, count) == (len(data), len(data)) and after != state
        assert 0 < reader.num_known <= 4
