"""Questions about a long document: six at once about each of several documents of about 1,700 tokens.

One program is one document, as a user has it who asks all that he wants to know about a report.
"""

import asyncio
import random
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import tag, towns

TOWNS, QUESTIONS, ANSWER_TOKENS = 20, 6, 16


@function
def program(s: Any, document: str, questions: list[str]) -> None:
    s += system(document)
    readers = s.fork(len(questions))
    for reader, question in zip(readers, questions, strict=True):
        reader += user(question)
        reader += assistant(gen("answer", max_tokens=ANSWER_TOKENS))
    readers.join()


async def plain(client: w.Client, document: str, questions: list[str]) -> list[str]:
    asked = [[w.system(document), w.user(question)] for question in questions]
    return await asyncio.gather(*(client.chat(messages, ANSWER_TOKENS) for messages in asked))


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    cases = []
    for _ in range(n):
        found = towns(rng, TOWNS)
        document = "\n\n".join([f"Gazetteer {tag(rng)}. Answer from this text.", *(town.passage() for town in found)])
        asked = [rng.choice(town.questions()) for town in rng.sample(found, QUESTIONS)]
        inputs = {"document": document, "questions": [question for question, _ in asked]}
        cases.append(w.Case(inputs, [answer for _, answer in asked]))
    return cases


def check(answers: list[str], expected: list[str]) -> bool:
    """At least half of the answers are right."""
    return 2 * sum(map(w.contains, answers, expected)) >= len(expected)


WORKLOAD = w.Workload(
    name="long_document",
    source="Questions about a long document, SGLang, Zheng et al., 2024, section 6",
    make=make,
    program=program,
    plain=plain,
    check=check,
    count=1,
    quick=1,
    large=0,
    free_tokens=QUESTIONS * ANSWER_TOKENS,
)
