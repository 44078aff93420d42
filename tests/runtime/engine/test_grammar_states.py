"""Learnt transitions equal those of the matcher, and a matcher that follows them is in the right state."""

import random

import numpy as np
from phloem.constrained import Vocabulary, compile
from phloem.runtime.engine.grammar_states import GrammarStates

TOKENS = [*(bytes([i]) for i in range(256)), b"ab", b"tr", b"true", b"", b"</s>"]
VOCABULARY = Vocabulary(TOKENS, {259, 260}, 260)


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
            after = states.after(np.array([number]), np.array([token])).item()
            assert walked.accept(token)
            num_known += after >= 0
            if after < 0:
                after = states.number_of(walked)
                states.learn(number, token, after)
            assert after == states.number_of(walked)
            assert np.array_equal(states.masks[after], walked.mask())
            number = after
            untold.append(after)
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
    after = states.number_of(matcher)
    assert after == -1
    states.learn(before, 260, after)
    assert states.after(np.array([before, -1]), np.array([260, 5])).tolist() == [-1, -1]


def test_after_forget_states_are_numbered_again() -> None:
    states = GrammarStates(len(TOKENS))
    grammar = compile("regex", "[ab]*", VOCABULARY)
    first = states.number_of(grammar.matcher())
    states.learn(first, 97, first)
    states.forget()
    assert states.number_of(grammar.matcher()) == 0
    assert states.after(np.array([first]), np.array([97])).tolist() == [-1]
