"""The limit of copying: a search through all ways to draft finds no faster one."""

import random

import pytest
from phloem.benchmarks.speculation import best_copying_s


def searched_s(text, first, at, step_s):
    """The least seconds to decode ``text`` from ``at`` on, by trying all drafts that begin after an equal token."""
    if at == len(text):
        return 0.0
    found = step_s(1) + searched_s(text, first, at + 1, step_s)
    for other in range(at - 1):
        if text[other] != text[at - 1]:
            continue
        for n in range(1, len(text) - at):
            if other + n >= at or text[other + 1 : other + 1 + n] != text[at : at + n]:
                break
            found = min(found, step_s(1 + n) + searched_s(text, first, at + n + 1, step_s))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_no_way_to_copy_is_faster(seed):
    rng = random.Random(seed)
    prompt, answer = rng.choices("abc", k=6), rng.choices("abc", k=7)
    found = best_copying_s(prompt, answer, lambda n: 1.0 + 0.3 * n)
    assert found == pytest.approx(searched_s([*prompt, *answer], 6, 6, lambda n: 1.0 + 0.3 * n))


def test_a_copy_of_the_prompt_takes_one_step_and_a_new_text_one_for_each_token():
    assert best_copying_s("xabcdef", "xabcdef", lambda n: 1.0) == 2.0  # the first token, then the rest
    assert best_copying_s("abc", "defg", lambda n: 1.0) == 4.0
