"""What was learnt of a grammar's steps is what its matcher does, and a matcher brought along is where it would be."""

import random

import numpy as np
from phloem.constrained import Vocabulary, compile
from phloem.runtime.engine.grammar_states import GrammarStates

TOKENS = [*(bytes([i]) for i in range(256)), b"ab", b"tr", b"true", b"", b"</s>"]
VOCABULARY = Vocabulary(TOKENS, {259, 260}, 260)


def test_a_matcher_that_follows_learnt_steps_is_where_its_tokens_lead() -> None:
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
                break  # it has to end here
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


def test_a_text_that_has_ended_has_no_number_and_nothing_is_learnt_of_it() -> None:
    states = GrammarStates(len(TOKENS))
    matcher = compile("regex", "a?", VOCABULARY).matcher()
    before = states.number_of(matcher)
    assert matcher.accept(260)
    after = states.number_of(matcher)
    assert after == -1
    states.learn(before, 260, after)
    assert states.after(np.array([before, -1]), np.array([260, 5])).tolist() == [-1, -1]


def test_what_is_forgotten_is_numbered_anew() -> None:
    states = GrammarStates(len(TOKENS))
    grammar = compile("regex", "[ab]*", VOCABULARY)
    first = states.number_of(grammar.matcher())
    states.learn(first, 97, first)
    states.forget()
    assert states.number_of(grammar.matcher()) == 0
    assert states.after(np.array([first]), np.array([97])).tolist() == [-1]
