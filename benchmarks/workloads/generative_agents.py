"""Generative agents: many short calls, each about one moment in the life of a persona.

Park et al., 2023: a persona's description comes first in every call. Each program is one moment of one persona: how
important it is, what the persona does now, and what it remembers of it.
"""

import asyncio
import random
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import FEATURES, MAYORS, paragraphs, tag, towns

MOMENTS = 3  # of each persona
PLAN_TOKENS, MEMORY_TOKENS = 24, 24
RATE = "How important is this, from 0 to 9?"
PLAN = "What do you do now?"
REMEMBER = "Write down what you remember of it."


@function
def program(s: Any, persona: str, moment: str) -> None:
    s += system(persona)
    calls = s.fork(3)
    calls += [user(f"{moment} {question}") for question in (RATE, PLAN, REMEMBER)]
    calls[0] += assistant(gen("answer", max_tokens=4, regex="[0-9]"))
    calls[1] += assistant(gen("answer", max_tokens=PLAN_TOKENS))
    calls[2] += assistant(gen("answer", max_tokens=MEMORY_TOKENS))
    calls.join()


async def plain(client: w.Client, persona: str, moment: str) -> list[str]:
    def asked(question: str) -> w.Messages:
        return [w.system(persona), w.user(f"{moment} {question}")]

    return await asyncio.gather(
        client.chat(asked(RATE), 4, regex="[0-9]"),
        client.chat(asked(PLAN), PLAN_TOKENS),
        client.chat(asked(REMEMBER), MEMORY_TOKENS),
    )


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    homes = towns(rng, (n + MOMENTS - 1) // MOMENTS)
    personas = [
        f"You are {rng.choice(MAYORS)}, {tag(rng)}, of {home.name}. {home.passage()} What you told of yourself: "
        f"{rng.choice(paragraphs())}\n\nYou speak in short sentences, as yourself."
        for home in homes
    ]
    moments = [f"It is {rng.randrange(6, 22)} o'clock. {rng.choice(FEATURES)}" for _ in range(n)]
    return [w.Case({"persona": personas[i // MOMENTS], "moment": moment}) for i, moment in enumerate(moments)]


WORKLOAD = w.Workload(
    name="generative_agents",
    source="Generative agents, Park et al., 2023",
    make=make,
    program=program,
    plain=plain,
    count=8,
    quick=3,
    large=3,
    free_tokens=PLAN_TOKENS + MEMORY_TOKENS,
    needs_grammar=True,
)
