"""A pipeline of retrieval: passages are found for a question, the model reasons about them, then answers.

The pipeline of DSPy (Khattab et al., 2023): an instruction and three solved examples, the passages that share most
words with the question, a reasoning, an answer. As in section 6 of the SGLang paper.
"""

import random
import re
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import Town, tag, towns

PASSAGES, REASON_TOKENS, ANSWER_TOKENS = 3, 40, 16
CONCLUDE = "So the answer, in a few words:"


def retrieve(corpus: list[str], question: str) -> str:
    """The passages that share most words with the question, best first."""
    asked = set(re.findall("[a-z]+", question.lower()))
    ranked = sorted(corpus, key=lambda text: -len(asked & set(re.findall("[a-z]+", text.lower()))))
    return "\n".join(f"[{i + 1}] {text}" for i, text in enumerate(ranked[:PASSAGES]))


@function
def program(s: Any, rules: str, corpus: list[str], question: str) -> None:
    s += system(rules)
    s += user(f"Context:\n{retrieve(corpus, question)}\n\nQuestion: {question}")
    s += assistant(gen("reason", max_tokens=REASON_TOKENS))
    s += user(CONCLUDE)
    s += assistant(gen("answer", max_tokens=ANSWER_TOKENS))


async def plain(client: w.Client, rules: str, corpus: list[str], question: str) -> str:
    messages = [w.system(rules), w.user(f"Context:\n{retrieve(corpus, question)}\n\nQuestion: {question}")]
    messages.append(w.assistant(await client.chat(messages, REASON_TOKENS)))
    return await client.chat([*messages, w.user(CONCLUDE)], ANSWER_TOKENS)


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    found = towns(rng, 24)
    corpus = [town.passage() for town in found]

    def solved(town: Town) -> str:
        question, answer = rng.choice(town.questions())
        return f"Context:\n[1] {town.passage()}\n\nQuestion: {question}\nAnswer: {answer}"

    examples = "\n\n".join(solved(town) for town in found[:3])
    rules = f"Guide {tag(rng)}. Answer questions from the given context, in a few words.\n\n{examples}"
    asked = [rng.choice(rng.choice(found).questions()) for _ in range(n)]
    return [w.Case({"rules": rules, "corpus": corpus, "question": text}, answer) for text, answer in asked]


WORKLOAD = w.Workload(
    name="rag",
    source="A DSPy pipeline of retrieval, Khattab et al., 2023",
    make=make,
    program=program,
    plain=plain,
    check=w.contains,
    count=8,
    quick=2,
    large=4,
    free_tokens=REASON_TOKENS + ANSWER_TOKENS,
)
