"""Skeleton of thought: first three points of an answer, then all points written out at the same time.

Ning et al., 2023.
"""

import asyncio
import random
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import tag, towns

POINTS, POINT_TOKENS = 3, 48
SKELETON = "".join(rf"{i + 1}\.( [A-Za-z]{{1,12}}){{3,7}}\n" for i in range(POINTS))
RULES = "You give travellers advice. First you give the skeleton of an answer: three short points, one on each line."


@function
def program(s: Any, question: str) -> None:
    s += system(RULES)
    s += user(question)
    s += assistant(gen("skeleton", max_tokens=64, regex=SKELETON))
    points = s.fork(POINTS)
    for i, point in enumerate(points):
        point += user(f"Write point {i + 1} out in one or two sentences, and nothing else.")
        point += assistant(gen("answer", max_tokens=POINT_TOKENS))
    points.join()


async def plain(client: w.Client, question: str) -> list[str]:
    messages = [w.system(RULES), w.user(question)]
    messages.append(w.assistant(await client.chat(messages, 64, regex=SKELETON)))
    asked = [f"Write point {i + 1} out in one or two sentences, and nothing else." for i in range(POINTS)]
    return await asyncio.gather(*(client.chat([*messages, w.user(text)], POINT_TOKENS) for text in asked))


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    questions = [
        f"I am {tag(rng)}, and I go to {town.name}. {town.passage()} What should I do on my first day there?"
        for town in towns(rng, n)
    ]
    return [w.Case({"question": question}) for question in questions]


WORKLOAD = w.Workload(
    name="skeleton_of_thought",
    source="Skeleton of thought, Ning et al., 2023",
    make=make,
    program=program,
    plain=plain,
    count=6,
    quick=2,
    large=2,
    free_tokens=POINTS * POINT_TOKENS,
    needs_grammar=True,
)
