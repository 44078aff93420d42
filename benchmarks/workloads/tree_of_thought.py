"""Tree of thought: propose three next steps, judge each, go on from the best, twice; then answer.

Yao et al., 2023, on word problems with known results, as in section 6 of the SGLang paper (GSM-8K).
"""

import asyncio
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import solved_problems

DEPTH, WIDTH, STEP_TOKENS, ANSWER_TOKENS = 2, 3, 40, 24
PROPOSE = "Propose the next step of the solution, in one sentence."
JUDGE = "How good is this step? Answer with a number from 0 to 9."
FINISH = "Now give the result."


@function
def program(s: Any, rules: str, problem: str) -> None:
    s += system(rules)
    s += user(problem)
    for level in range(DEPTH):
        s += user(PROPOSE)
        branches = s.fork(WIDTH)
        for i, branch in enumerate(branches):
            branch += assistant(gen("step", max_tokens=STEP_TOKENS, temperature=0.8, seed=level * WIDTH + i))
            branch += user(JUDGE)
            branch += assistant(gen("mark", max_tokens=4, regex="[0-9]"))
        best = max(branches, key=lambda branch: branch["mark"])
        s += assistant(best["step"])
    s += user(FINISH)
    s += assistant(gen("answer", max_tokens=ANSWER_TOKENS))


async def plain(client: w.Client, rules: str, problem: str) -> str:
    messages = [w.system(rules), w.user(problem)]

    async def branch(seed: int) -> tuple[str, str]:
        step = await client.chat(messages, STEP_TOKENS, temperature=0.8, seed=seed)
        judged = [*messages, w.assistant(step), w.user(JUDGE)]
        return step, await client.chat(judged, 4, regex="[0-9]")

    for level in range(DEPTH):
        messages = [*messages, w.user(PROPOSE)]
        branches = await asyncio.gather(*(branch(level * WIDTH + i) for i in range(WIDTH)))
        step, _ = max(branches, key=lambda found: found[1])
        messages = [*messages, w.assistant(step)]
    return await client.chat([*messages, w.user(FINISH)], ANSWER_TOKENS)


def make(seed: int, n: int) -> list[w.Case]:
    return solved_problems(seed, n, shots=5, task="You solve problems step by step and check each step.")


WORKLOAD = w.Workload(
    name="tree_of_thought",
    source="Tree of thought, Yao et al., 2023",
    make=make,
    program=program,
    plain=plain,
    check=w.contains,
    count=3,
    quick=1,
    free_tokens=DEPTH * WIDTH * STEP_TOKENS + ANSWER_TOKENS,
    needs_grammar=True,
)
