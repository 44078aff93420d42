"""Beam search: the likeliest continuation of a text by twelve tokens, with four beams.

The plain way keeps the beams itself and sends one request for each beam and token; engines behind a pipe have a beam
search of their own, and use it.
"""

import random
from typing import Any

from phloem import beam, function

from . import workload as w
from .texts import tag, towns

WIDTH, TOKENS = 4, 12


@function
def program(s: Any, text: str) -> None:
    s += text
    s += beam("answer", width=WIDTH, max_tokens=TOKENS)


async def plain(client: w.Client, text: str) -> str:
    return await client.beam(text, WIDTH, TOKENS)


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    return [
        w.Case({"text": f"Letter {tag(rng)}. {town.passage()} The people of {town.name} are known for"})
        for town in towns(rng, n)
    ]


WORKLOAD = w.Workload(
    name="beam_search",
    source="Beam search, as in Vaswani et al., 2017; width 4",
    make=make,
    program=program,
    plain=plain,
    count=6,
    quick=2,
    large=0,
    free_tokens=0,
    counts_output=False,
)
