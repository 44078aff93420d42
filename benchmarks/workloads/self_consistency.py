"""Self-consistency: eight reasonings are drawn for one problem, and the most common result wins.

Wang et al., 2023.
"""

import asyncio
from collections import Counter
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import solved_problems

N, REASON_TOKENS = 8, 48
FINISH = "So the result, as a number:"


@function
def program(s: Any, rules: str, problem: str) -> None:
    s += system(rules)
    s += user(problem)
    paths = s.fork(N)
    for i, path in enumerate(paths):
        path += assistant(gen("reason", max_tokens=REASON_TOKENS, temperature=0.8, seed=i))
        path += user(FINISH)
        path += assistant(gen("result", max_tokens=8, regex="[0-9]{1,4}"))
    s["answer"] = Counter(path["result"] for path in paths).most_common(1)[0][0]


async def plain(client: w.Client, rules: str, problem: str) -> str:
    messages = [w.system(rules), w.user(problem)]

    async def path(seed: int) -> str:
        reason = await client.chat(messages, REASON_TOKENS, temperature=0.8, seed=seed)
        return await client.chat([*messages, w.assistant(reason), w.user(FINISH)], 8, regex="[0-9]{1,4}")

    results = await asyncio.gather(*(path(seed) for seed in range(N)))
    return Counter(results).most_common(1)[0][0]


def make(seed: int, n: int) -> list[w.Case]:
    return solved_problems(seed, n, shots=8, task="You solve problems and explain how.")


WORKLOAD = w.Workload(
    name="self_consistency",
    source="Self-consistency, Wang et al., 2023; n = 8",
    make=make,
    program=program,
    plain=plain,
    check=w.equals,
    count=2,
    quick=1,
    large=0,
    free_tokens=N * REASON_TOKENS,
    needs_grammar=True,
)
