"""Chats of four turns with short or long answers.

The two multi-turn workloads of section 6 of the SGLang paper: long inputs, and answers of a few or of many tokens.
"""

import random
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import paragraphs, tag

TURNS = 4
INTRODUCTION = "You are a patient guide to an old orchard, and you answer what visitors ask."


@function
def program(s: Any, inputs: list[str], max_tokens: int) -> None:
    s += system(INTRODUCTION)
    for text in inputs[:-1]:
        s += user(text)
        s += assistant(gen("turn", max_tokens=max_tokens))
    s += user(inputs[-1])
    s += assistant(gen("answer", max_tokens=max_tokens))


async def plain(client: w.Client, inputs: list[str], max_tokens: int) -> str:
    messages = [w.system(INTRODUCTION)]
    for text in inputs:
        messages.append(w.user(text))
        messages.append(w.assistant(await client.chat(messages, max_tokens)))
    return messages[-1]["content"]


def make(max_tokens: int, seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    asked = "What do you say to that?" if max_tokens < 32 else "Tell me what else you know about that, at length."
    return [
        w.Case(
            {
                "inputs": [f"Letter {tag(rng)}: {text}\n\n{asked}" for text in rng.sample(paragraphs(), TURNS)],
                "max_tokens": max_tokens,
            }
        )
        for _ in range(n)
    ]


def make_short(seed: int, n: int) -> list[w.Case]:
    return make(8, seed, n)


def make_long(seed: int, n: int) -> list[w.Case]:
    return make(96, seed, n)


SHORT = w.Workload(
    name="chat_short",
    source="Multi-turn chat with short answers, SGLang, Zheng et al., 2024, section 6",
    make=make_short,
    program=program,
    plain=plain,
    count=4,
    quick=1,
    free_tokens=TURNS * 8,
)
LONG = w.Workload(
    name="chat_long",
    source="Multi-turn chat with long answers, SGLang, Zheng et al., 2024, section 6",
    make=make_long,
    program=program,
    plain=plain,
    count=3,
    quick=1,
    free_tokens=TURNS * 96,
)
