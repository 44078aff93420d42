"""A model as a judge: a text is judged on four dimensions at once, the judgements are merged, and a grade follows.

Branch-solve-merge, Saha et al., 2023, as in section 6 of the SGLang paper.
"""

import asyncio
import random
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import paragraphs, tag

DIMENSIONS = ("clarity", "correctness", "style", "use of examples")
JUDGEMENT_TOKENS, SUMMARY_TOKENS = 40, 40
RULES = "You are a strict but fair judge of texts. You judge one dimension at a time, in one or two sentences."


@function
def program(s: Any, text: str) -> None:
    s += system(RULES)
    s += user(text)
    judges = s.fork(len(DIMENSIONS))
    for judge, dimension in zip(judges, DIMENSIONS, strict=True):
        judge += user(f"Judge the text's {dimension}.")
        judge += assistant(gen("judgement", max_tokens=JUDGEMENT_TOKENS))
    judges.join()
    s += user("The judgements: " + s.ref("judgement", sep=" ") + " Sum them up.")
    s += assistant(gen("summary", max_tokens=SUMMARY_TOKENS))
    s += user("The grade, from A to F:")
    s += assistant(gen("answer", max_tokens=4, regex="[A-F]"))


async def plain(client: w.Client, text: str) -> str:
    messages = [w.system(RULES), w.user(text)]
    asked = [[*messages, w.user(f"Judge the text's {dimension}.")] for dimension in DIMENSIONS]
    judgements = await asyncio.gather(*(client.chat(one, JUDGEMENT_TOKENS) for one in asked))
    messages.append(w.user("The judgements: " + " ".join(judgements) + " Sum them up."))
    messages.append(w.assistant(await client.chat(messages, SUMMARY_TOKENS)))
    return await client.chat([*messages, w.user("The grade, from A to F:")], 4, regex="[A-F]")


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    texts = ["\n\n".join(rng.sample(paragraphs(), 2)) for _ in range(n)]
    return [w.Case({"text": f"Essay {tag(rng)}:\n\n{text}"}) for text in texts]


WORKLOAD = w.Workload(
    name="llm_judge",
    source="Branch-solve-merge, Saha et al., 2023; four dimensions",
    make=make,
    program=program,
    plain=plain,
    count=3,
    quick=1,
    free_tokens=len(DIMENSIONS) * JUDGEMENT_TOKENS + SUMMARY_TOKENS,
    needs_grammar=True,
)
