import json
import random

import numpy as np
import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.expressions import Expressions
from phloem.constrained.json import scalars
from phloem.constrained.machine import StringText
from phloem.constrained.machine import joint_sets as module
from phloem.constrained.machine.joint_sets import JointSets, has_text_of
from phloem.constrained.machine.part_sets import NoParts, PartSets
from phloem.constrained.machine.walk import EXITED, REFUSED
from phloem.constrained.native_code import native
from phloem.constrained.regex_syntax import compile_regex

WORDS = {"pattern": r"^(\S+\s+){0,49}\S+$", "maxLength": 100}
SCHEMAS = [
    {"oneOf": [WORDS, {"maxLength": 40}]},
    {"oneOf": [{"pattern": "^[a-z]{1,20}(-[a-z]+){0,30}$"}, {"pattern": r"\.[a-z]{1,7}\.|wk"}, {"maxLength": 12}]},
    {"pattern": r"^([\w.-]{2,30}\s){1,49}[\w.-]{2,30}$", "maxLength": 100, "not": {"pattern": "fit$"}},
    {"if": {"pattern": "^[a-m]"}, "then": {"pattern": "^[a-zé]{1,8}(-[a-z]+){0,13}$"}, "else": {"maxLength": 40}},
    {"anyOf": [{"pattern": "^[^,]*,[^,]*$", "not": {"pattern": "a,b"}}, {"pattern": "^x", "not": {"maxLength": 9}}]},
    {"not": {"anyOf": [{"pattern": "  "}, {"pattern": r"[\\/\n]$"}]}, "minLength": 3},
    {"allOf": [{"pattern": "^(ab|a|b){0,40}$"}, {"pattern": "^.{3,30}$"}, {"not": {"pattern": "^(a|ba)*$"}}]},
    {"oneOf": [{**WORDS, "maxLength": 17}, {**WORDS, "maxLength": 20}]},
    {"oneOf": [{"maxLength": 3}, {"pattern": "é"}, {"pattern": "^[^é]{2,5}(ab){0,20}$"}]},
    {"pattern": r"^[A-Z][a-z ]+( [a-z]{1,60}){0,100}[.]$", "minLength": 100, "maxLength": 130},
    {"pattern": "^(([^x]{4}){0,9}|(é[a-z]{7}){0,5})$", "minLength": 9, "not": {"pattern": "^.{11,13}$|a{3}"}},
    {"anyOf": [{"pattern": ".+$", "minLength": 12, "maxLength": 64}, {"maxLength": 40}]},
]  # fmt: skip

WITHOUT_ESCAPES = "^[A-Z][a-z ]", "^(ab|a|b)"  # how these patterns begin


@native
def _has_text(tables, number, least, most):
    return has_text_of(tables, number, least, most)


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_walk_finds_what_the_states_of_the_machine_allow(
    vocabulary: Vocabulary, schema: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalars, "MOST_COUNTED_WHOLE", -1)  # no string's states are made as a whole
    monkeypatch.setattr(Expressions, "counted", lambda ex, expr: None)  # nor are its characters counted
    vocabulary = Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos)
    grammar = compile("json_schema", json.dumps({"type": "string", **schema}), vocabulary)
    machine, walker, rng = grammar.machine, grammar.masks.walker, random.Random(str(schema))
    barrier = machine.add_frame(lambda result: EXITED)
    joint_sets = JointSets(PartSets(machine.expressions))
    compared = [0, 0]
    for _ in range(6):
        matcher = grammar.matcher()
        for _ in range(12):
            state = machine.place(matcher.state)[0]
            machine.settle(state)
            places = [(state, machine.string_texts.get(state))]
            if machine.recurring[state]:
                behind = int(machine.row(state)[ord("\\")])
                places.append((behind, machine.string_texts.get(behind)))
            for state, text in places:
                if text is None or machine.expressions.is_plain[text.expr]:
                    continue
                masks = [np.zeros(vocabulary.num_words, np.uint32) for _ in range(2)]
                stack = machine.stack(barrier, 0)
                exits, regions = joint_sets.walk(vocabulary.trie, text, masks[0])
                for node, expr, count in regions:
                    behind = int(machine.row(text.state_of(expr))[ord("\\")])
                    assert behind != REFUSED
                    region = np.array([[node, behind, count, stack, 0]])
                    exits = np.concatenate([exits, walker.from_regions(walker.whole, masks[0], region)])
                slow = walker.from_state(walker.whole, masks[1], state, 0, stack)
                assert np.array_equal(*masks)
                assert np.array_equal(exits[np.argsort(exits[:, 0])], slow)
                compared[text.is_escaping] += 1
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed.tolist()))
            if token == vocabulary.eos:
                break
            assert matcher.accept(token), matcher.error
    has_escapes = not any(pattern in str(schema) for pattern in WITHOUT_ESCAPES)
    assert compared[0] and bool(compared[1]) == has_escapes


def walked(joint_sets: JointSets, vocabulary: Vocabulary, expr: int) -> np.ndarray:
    mask = np.zeros(vocabulary.num_words, np.uint32)
    joint_sets.walk(vocabulary.trie, StringText(expr, True, False, lambda expr: 0), mask)
    return mask


def both(ex: Expressions, *patterns: str) -> int:
    return ex.intersect(*[compile_regex(pattern, ex, anchored=True) for pattern in patterns])


def test_lengths_that_exclude_each_other_are_told(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = Expressions(vocabulary.has_byte)
    expr = both(ex, "[a-z]{2,5}(-[a-z]{2,5}){0,9}", "[^x]*", ".{0,9}")
    asked, is_nonempty = [], Expressions.is_nonempty
    monkeypatch.setattr(Expressions, "is_nonempty", lambda ex, e: asked.append(e) or is_nonempty(ex, e))
    mask = walked(JointSets(PartSets(ex)), vocabulary, expr)
    assert not asked and mask.any()
    allowed = {token for token in vocabulary.tokens if token and is_nonempty(ex, _after(ex, expr, token))}
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    plain = [t for t, token in enumerate(vocabulary.tokens) if vocabulary.is_text[t] and b'"' not in token]
    assert [t for t in plain if bits[t]] == [t for t in plain if vocabulary.tokens[t] in allowed]


def _after(ex: Expressions, expr: int, data: bytes) -> int:
    for byte in data:
        expr = ex.derive(expr, byte)
    return expr


def lengths_of(ex: Expressions, expr: int, most: int) -> set[int]:
    """The numbers of characters of the ASCII texts of a language, up to ``most``."""
    found, level = set(), {expr}
    for length in range(most + 1):
        if any(ex.nullable[rest] for rest in level):
            found.add(length)
        level = {to for rest in level for lo, _, to in ex.moves(rest) if lo < 0x80}
    return found


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]{2,5}(-[a-z]{2,5}){0,9}", "(ab|c{7}){2,5}", "(a{9}){0,4}", "(a{5}){1,3}b{0,3}", "([^x]{4}|(yz){3}){0,3}",
        "a{2,4}(b{10}c{0,8}){0,3}", "abc", "(a{6}|a{20})(b{7}){0,2}", "(a{3}){2,}", "(a{11}){0,3}|b{3}(c{4}){1,2}",
    ],
)  # fmt: skip
def test_a_text_of_a_bounded_length_is_only_shown_where_there_is_one(vocabulary: Vocabulary, pattern: str) -> None:
    ex = Expressions(vocabulary.has_byte)
    sets = PartSets(ex)
    expr, shown = compile_regex(pattern, ex, anchored=True), 0
    lengths, number = lengths_of(ex, expr, 80), sets.set_of(expr)
    for least in range(50):
        for most in range(least, 60):
            if _has_text(sets.tables, number, least, most):
                assert not lengths.isdisjoint(range(least, most + 1)), (least, most)
                shown += 1
    assert shown


def test_what_lengths_surely_leave_is_told_by_no_text(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = Expressions(vocabulary.has_byte)
    expr = ex.intersect(both(ex, "[a-z ]+( [a-z]{1,60}){0,100}[.]"), ex.repeat(ex.any_char, 200, 300))
    monkeypatch.setattr(Expressions, "is_nonempty", lambda ex, e: pytest.fail("asked"))
    joint_sets = JointSets(PartSets(ex))
    assert walked(joint_sets, vocabulary, expr).any()
    assert joint_sets.num_told == 0


def test_what_no_listed_text_tells_is_asked(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = Expressions(vocabulary.has_byte)
    expr = both(ex, "(a|b)*a(a|b)b", "(a|bb)*b(a|b)", "(a|b){6,}")
    asked, is_nonempty = [], Expressions.is_nonempty
    monkeypatch.setattr(Expressions, "is_nonempty", lambda ex, e: asked.append(e) or is_nonempty(ex, e))
    mask = walked(JointSets(PartSets(ex)), vocabulary, expr)
    assert asked and mask.any()


def test_a_formula_that_is_asked_too_much_is_unsuitable(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    ex = Expressions(vocabulary.has_byte)
    expr = both(ex, "(a|b)*a(a|b)b", "(a|bb)*b(a|b)", "(a|b){6,}")
    joint_sets = JointSets(PartSets(ex))
    walked(joint_sets, vocabulary, expr)
    monkeypatch.setattr(module, "MOST_ASKED", 0)
    joint_sets = JointSets(PartSets(ex))
    asked, is_nonempty = [], Expressions.is_nonempty
    monkeypatch.setattr(Expressions, "is_nonempty", lambda ex, e: asked.append(e) or is_nonempty(ex, e))
    for _ in range(2):
        with pytest.raises(NoParts):
            walked(joint_sets, vocabulary, expr)
    assert not asked


def test_what_has_no_joints_or_too_many_is_unsuitable(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = Expressions(vocabulary.has_byte)
    expr = both(ex, "[a-z ]{2,40}", "[^x]*y.*", ".{0,30}")
    mask = walked(JointSets(PartSets(ex)), vocabulary, expr)
    for unsuitable in (ex.concat(ex.literal(b"x"), expr), both(ex, *[f"{c}.*" for c in "abcdefghij"])):
        with pytest.raises(NoParts):
            walked(JointSets(PartSets(ex)), vocabulary, unsuitable)
    for limit in ("MAX_JOINTS", "MOST_LANGUAGES", "MOST_OPERATIONS"):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, 2)
            with pytest.raises(NoParts):
                walked(JointSets(PartSets(ex)), vocabulary, expr)
    assert np.array_equal(walked(JointSets(PartSets(ex)), vocabulary, expr), mask)


def test_what_was_forgotten_is_found_again(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = Expressions(vocabulary.has_byte)
    exprs = [both(ex, "([a-z]{2,9}[., -]){1,9}", f"[^{c}]*", ".{0,30}") for c in "abcdef"]
    expected = [walked(JointSets(PartSets(ex)), vocabulary, expr) for expr in exprs]
    joint_sets = JointSets(PartSets(ex))
    for limit in ("MAX_JOINTS", "MAX_FORMULAS"):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, 1)
            for expr, mask in zip(exprs * 2, expected * 2, strict=True):
                assert np.array_equal(walked(joint_sets, vocabulary, expr), mask)
