"""Learnt transitions equal those of the matcher, and a matcher that follows them is in the right state."""

import random

import numpy as np
from phloem.constrained import CompiledGrammar, Vocabulary, compile
from phloem.constrained.grammar import Step
from phloem.runtime.engine.grammar_states import MIN_JUMP, GrammarStates

TOKENS = [*(bytes([i]) for i in range(256)), b"ab", b"tr", b"true", b"", b"</s>"]
VOCABULARY = Vocabulary(TOKENS, {259, 260}, 260)


def after(
    states: GrammarStates, numbers: list[int], tokens: list[int], *, derives: bool, jumps: bool = False
) -> list[int]:
    step_at_once = CompiledGrammar.step_at_once if derives else lambda grammar, state, token_id: None
    return states.after(np.array(numbers), np.array(tokens), step_at_once, jumps=jumps).tolist()


def test_following_learnt_transitions_equals_accepting_the_tokens() -> None:
    states = GrammarStates(len(TOKENS))
    rng = random.Random(1)
    num_known = 0
    grammars = [compile("regex", "[a-c]{1,30}x?", VOCABULARY), compile("json", "", VOCABULARY)]
    for turn in range(60):
        grammar = grammars[turn % 2]
        walked, led = grammar.matcher(), grammar.matcher()
        number, untold = states.number_of(walked), []
        for _ in range(20):
            mask = walked.mask()
            allowed = [i for i in range(259) if mask[i >> 5] >> (i & 31) & 1]
            if not allowed:
                break  # the text has to end here
            token = rng.choice(allowed[:4])
            (found,) = after(states, [number], [token], derives=turn % 4 > 1)
            assert walked.accept(token)
            num_known += found >= 0
            if found < 0:
                found = states.number_of(walked)
                states.learn(number, token, found)
            assert found == states.number_of(walked)
            assert np.array_equal(states.masks[found], walked.mask())
            number = found
            untold.append(found)
        states.follow(led, np.array(untold))
        assert led.state == walked.state and led.num_tokens == walked.num_tokens
        led.rollback(len(untold) // 2)
        walked.rollback(len(untold) // 2)
        assert led.state == walked.state
    assert num_known > 100


def test_an_ended_text_has_no_number_and_no_transition_is_learnt() -> None:
    states = GrammarStates(len(TOKENS))
    matcher = compile("regex", "a?", VOCABULARY).matcher()
    before = states.number_of(matcher)
    assert matcher.accept(260)
    assert states.number_of(matcher) == -1
    states.learn(before, 260, -1)
    assert after(states, [before, -1], [260, 5], derives=True) == [-1, -1]


def test_after_forget_states_are_numbered_again() -> None:
    states = GrammarStates(len(TOKENS))
    grammar = compile("regex", "[ab]*", VOCABULARY)
    first = states.number_of(grammar.matcher())
    states.learn(first, 97, first)
    states.forget()
    assert states.number_of(grammar.matcher()) == 0
    assert after(states, [first], [97], derives=False) == [-1]


def test_equal_steps_of_one_question_are_derived_once() -> None:
    states = GrammarStates(len(TOKENS))
    grammar = compile("regex", "[ab]{2}c", VOCABULARY)
    first, num_asked = states.number_of(grammar.matcher()), 0

    def counted(grammar: CompiledGrammar, state: int, token_id: int) -> Step | None:
        nonlocal num_asked
        num_asked += 1
        return grammar.step_at_once(state, token_id)

    grammar.matcher().prepare([97])
    found = states.after(np.array([first] * 3), np.array([97] * 3), counted, jumps=False)
    assert num_asked == 1 and len(set(found.tolist())) == 1 and found[0] >= 0


def test_a_run_of_forced_tokens_is_left_to_the_matcher_if_it_is_long() -> None:
    for length in (1, MIN_JUMP - 1, MIN_JUMP):
        grammar = compile("regex", f"[xy]{'q' * length}[xy]+", VOCABULARY)
        grammar.matcher().prepare([ord("x"), *[ord("q")] * length, ord("x")])
        states = GrammarStates(len(TOKENS))
        first = states.number_of(grammar.matcher())
        assert (after(states, [first], [ord("x")], derives=True, jumps=True) == [-1]) == (length >= MIN_JUMP)
        assert after(states, [first], [ord("x")], derives=True) != [-1]
