"""llama.cpp's server: started for a benchmark, and asked for the probabilities of one token after given tokens."""

import contextlib
import math
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from .serving import free_port, started

_FORCED = 1e4  # added to a logit, so that its token is drawn; probabilities are those of the logits without it
_LIKELIEST = 16  # tokens whose probabilities an answer has


@contextlib.contextmanager
def llama_server(path: str, model: Path, threads: int) -> Iterator[str]:
    """Its address. 16 requests at a time have 4,096 tokens each."""
    port = free_port()
    flags = ["-c", "65536", "-np", "16", "-t", str(threads), "--host", "127.0.0.1", "--port", str(port)]
    with started([path, "-m", str(model), *flags], port, output=subprocess.DEVNULL) as url:
        yield url


class NextToken(NamedTuple):
    """``best``: the likeliest token. ``logprobs``: of the tokens that were asked for."""

    best: int
    logprobs: tuple[float, ...]


class LlamaCpp:
    """A server at ``url``. Each answer is one decode step: its prompt, but for the last token, is cached."""

    def __init__(self, url: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self._http = httpx.Client(base_url=url, timeout=300.0, transport=transport)

    def after(self, tokens: Sequence[int], *wanted: int) -> NextToken:
        """What comes after ``tokens``. Raises ValueError where the server forced another token than it was asked to."""
        best, found = self._ask(tokens, None)
        for token in wanted:
            if token not in found:
                found |= self._ask(tokens, token)[1]
        return NextToken(best, tuple(found[token] for token in wanted))

    def _ask(self, tokens: Sequence[int], forced: int | None) -> tuple[int, dict[int, float]]:
        """(the likeliest token, the log-probabilities of the likeliest ones and of ``forced``)."""
        body = {
            "prompt": list(tokens),
            "n_predict": 1,
            "n_probs": _LIKELIEST,
            "temperature": 0.0,
            "cache_prompt": True,
            "id_slot": 0,
            "logit_bias": [] if forced is None else [[forced, _FORCED]],
        }
        answer = self._http.post("/completion", json=body)
        answer.raise_for_status()
        drawn: dict[str, Any] = answer.json()["completion_probabilities"][0]
        if forced is not None and drawn["id"] != forced:
            raise ValueError(f"llama.cpp answered token {drawn['id']}, not {forced}")
        likeliest = drawn["top_logprobs"]
        return likeliest[0]["id"], {one["id"]: one["logprob"] for one in [*likeliest, drawn]}


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))
