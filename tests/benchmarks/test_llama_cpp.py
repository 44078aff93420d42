"""llama.cpp's probabilities are read as those of our own reader are."""

import itertools
import json
import math

import httpx
import pytest
import torch
from phloem.benchmarks.llama_cpp import LlamaCpp, perplexity
from phloem.benchmarks.quality import llama_partings, llama_scores
from phloem.runtime.quantizing.quality import GreedyText

NUM_TOKENS = 24


def logprob(before: int, token: int) -> float:
    """A model of pairs: after a token the one that is a step higher is the likeliest, then those after it."""
    weights = [2.0 ** -((token - before - 1) % NUM_TOKENS) for token in range(NUM_TOKENS)]
    return math.log(weights[token] / sum(weights))


def served(request: httpx.Request) -> httpx.Response:
    """What llama.cpp's server answers: the forced token is drawn, with the probability that it has without force."""
    body = json.loads(request.content)
    before = body["prompt"][-1]
    order = sorted(range(NUM_TOKENS), key=lambda token: -logprob(before, token))
    forced = body["logit_bias"][0][0] if body["logit_bias"] else order[0]
    top = [{"id": token, "logprob": logprob(before, token)} for token in order[: body["n_probs"]]]
    drawn = {"id": forced, "logprob": logprob(before, forced), "top_logprobs": top}
    return httpx.Response(200, json={"completion_probabilities": [drawn]})


@pytest.fixture
def llama() -> LlamaCpp:
    return LlamaCpp("http://llama", transport=httpx.MockTransport(served))


def test_every_token_of_a_text_has_its_own_probability(llama: LlamaCpp) -> None:
    ids = [3, 4, 2, 2, 9]  # 2 is far from the likeliest after 4, and 2 after 2
    best, logprobs = llama_scores(llama, torch.tensor(ids))
    assert best == [4, 5, 3, 3, 10]
    assert logprobs == [logprob(a, b) for a, b in itertools.pairwise(ids)]
    assert perplexity(logprobs) == pytest.approx(math.prod(math.exp(-x) for x in logprobs) ** 0.25)


def test_a_parting_is_where_the_likeliest_token_is_another(llama: LlamaCpp) -> None:
    class Words:
        def decode(self, ids: list[int], *, skip_special: bool) -> str:
            return f"<{ids[0]}>"

    text = GreedyText(
        2, torch.tensor([1, 2, 3]), torch.tensor([3, 7]), torch.tensor([4, 4]), torch.tensor([math.log(2.0), 1.0])
    )
    found, error = llama_partings(llama, [text], Words())  # type: ignore[arg-type]
    assert [(one.prompt, one.position, one.reference, one.other) for one in found] == [(0, 1, "<7>", "<4>")]
    assert error == pytest.approx(abs(logprob(3, 7) - logprob(3, 4) - 1.0) / math.sqrt(2))


def test_a_server_that_cannot_be_forced_is_refused() -> None:
    def unforced(request: httpx.Request) -> httpx.Response:
        drawn = {"id": 1, "logprob": 0.0, "top_logprobs": [{"id": 1, "logprob": 0.0}]}
        return httpx.Response(200, json={"completion_probabilities": [drawn]})

    llama = LlamaCpp("http://llama", transport=httpx.MockTransport(unforced))
    with pytest.raises(ValueError, match="answered token 1, not 5"):
        llama.after([1], 5)
