import json
import mmap
import random
import string
from typing import Any

import numpy as np
import pytest
from phloem.constrained import Vocabulary, compile
from phloem.constrained.expressions import Expressions
from phloem.constrained.machine import MAX_NEED, UNBOUNDED, StringText
from phloem.constrained.machine import part_sets as module
from phloem.constrained.machine.joint_sets import JointSets
from phloem.constrained.machine.part_sets import NoParts, PartSets
from phloem.constrained.machine.walk import EXITED, REFUSED
from phloem.constrained.regex_syntax import compile_regex

PATTERNS = [
    r"^(\S+\s+){0,49}\S+$", r"^([^\n]{0,20}\n){0,20}[^\n]{0,40}$", r"^((a|ab){0,9}c){1,9}$", r"^([a-z]+[,;]?){3,30}$",
    r"^([^,]{1,5}(-[^,]{1,40}){0,40}\.){1,9}[a-z]{2,6}$", r"^(\w+\s?){1,30}$", r"[a-zé]{3}[0-9]{2,40}", "^.{0,30}: .*$",
    r"^[^a]{0,20}(a[^a]{0,20}){0,30}$", r"^(é|\\|\"|[\x00-\x1f]){0,30}x{3,40}$", "^(ab|a|b{2,30}){20,30}$",
    r"^(\S+ ){20,90}\S+$",
]  # fmt: skip


@pytest.mark.parametrize("bounds", [{}, {"maxLength": 60}, {"minLength": 3, "maxLength": 400}])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_walk_finds_what_the_states_of_the_machine_allow(
    vocabulary: Vocabulary, pattern: str, bounds: dict[str, int]
) -> None:
    grammar = compile("json_schema", json.dumps({"type": "string", "pattern": pattern, **bounds}), vocabulary)
    machine, walker, rng = grammar.machine, grammar.masks.walker, random.Random(pattern)
    barrier = machine.add_frame(lambda result: EXITED, high=UNBOUNDED - 1)
    part_sets = PartSets(machine.expressions)
    compared = 0
    for _ in range(4):
        matcher = grammar.matcher()
        for _ in range(12):
            state = machine.place(matcher.state)[0]
            machine.settle(state)
            text = machine.string_texts.get(state)
            if text is not None:
                masks = [np.zeros(vocabulary.num_words, np.uint32) for _ in range(2)]
                needs = [np.full(32 * vocabulary.num_words, MAX_NEED + 1, np.uint16) for _ in range(2)]
                used = needs if text.is_counted else [None, None]
                stack = machine.stack(barrier, 0)
                found = part_sets.walk(vocabulary.trie, text, masks[0], used[0])
                exits = found.exits
                for node, expr, count in found.regions:
                    before = text.state_of(expr)
                    behind = int(machine.row(before)[ord("\\")])
                    assert behind != REFUSED
                    region = np.array([[node, behind, count, stack, 0]])
                    exits = np.concatenate([exits, walker.from_regions(walker.whole, masks[0], region, used[0])])
                slow = walker.from_state(walker.whole, masks[1], state, 0, stack, used[1])
                assert np.array_equal(masks[0], masks[1]) and np.array_equal(needs[0], needs[1])
                assert np.array_equal(exits[np.argsort(exits[:, 0])], slow)
                compared += 1
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            token = int(rng.choice(allowed.tolist()))
            if token == vocabulary.eos:
                break
            assert matcher.accept(token), matcher.error
    assert compared


def walked(part_sets: PartSets, vocabulary: Vocabulary, expr: int) -> np.ndarray:
    mask = np.zeros(vocabulary.num_words, np.uint32)
    part_sets.walk(vocabulary.trie, StringText(expr, True, False, lambda expr: 0), mask)
    return mask


def test_a_set_keeps_no_part_whose_texts_another_one_has(vocabulary: Vocabulary) -> None:
    ex = Expressions(vocabulary.has_byte)
    wide, narrow = (compile_regex(f"(a|bb){{0,{n}}}c", ex, anchored=True) for n in (9, 4))
    alone, both = PartSets(ex), PartSets(ex)
    assert np.array_equal(walked(alone, vocabulary, wide), walked(both, vocabulary, ex.union(wide, narrow)))
    assert alone.num_parts == both.num_parts


def test_counts_need_no_rules_of_their_own(vocabulary: Vocabulary) -> None:
    ex = Expressions(vocabulary.has_byte)
    part_sets = PartSets(ex)
    walked(part_sets, vocabulary, compile_regex(r"(\S{1,20}\s+){5,60}\S+", ex, anchored=True))
    before = part_sets.num_rules
    walked(part_sets, vocabulary, compile_regex(r"(\S{1,20}\s+){7,90}\S+", ex, anchored=True))
    assert part_sets.num_rules == before > 0


def test_what_has_no_parts_or_too_many_is_unsuitable(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = Expressions(vocabulary.has_byte)
    part_sets = PartSets(ex)
    both = ex.intersect(*[compile_regex(pattern, ex, anchored=True) for pattern in ("a.*", ".*b")])
    for expr in (both, ex.concat(ex.literal(b"x"), both)):
        with pytest.raises(NoParts):
            walked(part_sets, vocabulary, expr)
    letters = string.ascii_letters + string.digits + "_"
    many = compile_regex("|".join(f"{letter}{{2,9}}x" for letter in letters), ex, anchored=True)
    assert len(letters) == 63
    mask = walked(part_sets, vocabulary, many)
    for limit in ("MAX_SETS", "MAX_PARTS", "MAX_RULES", "MAX_MOVES", "MAX_WORK"):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, 64 if limit == "MAX_PARTS" else 2)
            with pytest.raises(NoParts):
                walked(PartSets(ex), vocabulary, many)
    assert np.array_equal(walked(part_sets, vocabulary, many), mask)


def test_what_was_forgotten_is_found_again(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    ex = Expressions(vocabulary.has_byte)
    exprs = [compile_regex(f"([a-z]{{2,9}}[{c}., -]){{1,9}}{c}", ex, anchored=True) for c in "0123456789"]
    expected = [walked(PartSets(ex), vocabulary, expr) for expr in exprs]
    part_sets, alone = PartSets(ex), PartSets(ex)
    walked(alone, vocabulary, exprs[-1])
    for limit, keeps_rules in (("MAX_SETS", True), ("MAX_RULES", False)):  # there is room for more
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, 7)
            for expr, mask in zip(exprs * 2, expected * 2, strict=True):
                assert np.array_equal(walked(part_sets, vocabulary, expr), mask)
        assert (part_sets.num_rules > alone.num_rules) == keeps_rules
        assert part_sets.num_parts == alone.num_parts


@pytest.mark.parametrize("bounds", [{}, {"maxLength": 400}])
def test_the_masks_of_a_counting_pattern_are_walked_by_parts(
    vocabulary: Vocabulary, bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    walks, walk = [], PartSets.walk

    def noted(part_sets: PartSets, *args: object) -> object:
        walks.append(found := walk(part_sets, *args))
        return found

    monkeypatch.setattr(PartSets, "walk", noted)
    fresh = Vocabulary(vocabulary.tokens, vocabulary.special, vocabulary.eos)
    text = json.dumps({"type": "string", "pattern": r"^(\w{1,30}[ -]+){0,90}\w+$", **bounds})
    matcher = compile("json_schema", text, fresh).matcher()
    for word in (b'"', b"name", b" a", b"-a"):
        assert matcher.accept(fresh.tokens.index(word))
    walks.clear()
    matcher.mask()
    assert walks


def test_rules_that_reading_asked_for_in_vain_are_made_by_a_walk(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    ex = Expressions(vocabulary.has_byte)
    expr = compile_regex("(ab{2,9}|a[bc]{1,5}-){2,9}", ex, anchored=True)
    expected = walked(PartSets(ex), vocabulary, expr)

    def fail(sets: PartSets, key: int) -> None:
        raise NoParts

    for most_rules in (0, 1, 8):
        part_sets = PartSets(ex)
        part_sets.set_of(expr)
        assert part_sets.read(expr, b"ab", False, 0)[0] == 0
        with monkeypatch.context() as patch:
            patch.setattr(PartSets, "_make_rule", fail)
            if most_rules:
                with pytest.raises(NoParts):
                    part_sets.read(expr, b"ab", False, most_rules)
        assert np.array_equal(walked(part_sets, vocabulary, expr), expected)
        size, count, rest = part_sets.read(expr, b"abbx", False, most_rules)
        assert (size, count) == (3, 3)
        assert ex.is_subset(rest, ex.derive(ex.derive(ex.derive(expr, 97), 98), 98))


def test_alternatives_with_a_common_beginning_have_the_shapes_of_those_without(vocabulary: Vocabulary) -> None:
    ex = Expressions(vocabulary.has_byte)
    one, other = (compile_regex(pattern, ex, anchored=True) for pattern in ("[a-z]+(-b{2,9})+", "[a-z]+[0-9]{3,9}"))
    both = ex.union(one, other)
    assert ex.nodes[both][0] == "cat"
    part_sets = PartSets(ex)
    alone = {*part_sets.chains(one)[0][0]} | {*part_sets.chains(other)[0][0]}
    assert {element for elements, _ in part_sets.chains(both) for element in elements} == alone
    assert part_sets.rest(part_sets.set_of(both)) == both


def test_no_table_asks_for_huge_pages(vocabulary: Vocabulary) -> None:
    part_sets = PartSets(Expressions(vocabulary.has_byte))
    for sets in (part_sets, JointSets(part_sets)):  # NumPy asks for them: a mask would wait for one to be made
        area: Any = sets.tables
        while isinstance(area, np.ndarray | np.void):
            area = area.base
        assert isinstance(area.obj if isinstance(area, memoryview) else area, mmap.mmap)
