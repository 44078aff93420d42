"""MMLU-like: multiple choice by subject, five solved examples before each question. All answers are known.

MMLU (Hendrycks et al., 2021) with five shots, as in section 6 of the SGLang paper (Zheng et al., 2024).
"""

import random
from collections.abc import Callable
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import tag, towns

SHOTS = 5
LETTERS = "ABCD"


@function
def program(s: Any, examples: str, question: str) -> None:
    s += system(examples)
    s += user(question)
    s += assistant(gen("answer", max_tokens=4, regex="[ABCD]"))


async def plain(client: w.Client, examples: str, question: str) -> str:
    return await client.chat([w.system(examples), w.user(question)], 4, regex="[ABCD]")


# -- cases ------------------------------------------------------------------------------------------------------------

Made = tuple[str, str, list[str]]  # question, right answer, wrong answers


def arithmetic(rng: random.Random) -> Made:
    a, b = rng.randrange(12, 99), rng.randrange(12, 99)
    wrong = [str(a + b + d) for d in rng.sample([-11, -10, -2, -1, 1, 2, 10, 11], 3)]
    return (
        f"A farmer has {a} sheep and buys {b} more at the market. How many sheep has the farmer now?",
        str(a + b),
        wrong,
    )


def first_letters(rng: random.Random) -> Made:
    right, *wrong = rng.sample(
        ["apple", "bridge", "candle", "dragon", "engine", "forest", "garden", "harbour", "island"], 4
    )
    return f"Which of these words begins with the letter {right[0].upper()}?", right, wrong


def capitals(rng: random.Random) -> Made:
    known = {
        "France": "Paris",
        "Italy": "Rome",
        "Spain": "Madrid",
        "Japan": "Tokyo",
        "Germany": "Berlin",
        "Egypt": "Cairo",
        "Russia": "Moscow",
        "Greece": "Athens",
        "Austria": "Vienna",
        "Portugal": "Lisbon",
    }
    land = rng.choice(sorted(known))
    wrong = rng.sample(sorted(set(known.values()) - {known[land]}), 3)
    return f"A traveller wants to see the government buildings. What is the capital of {land}?", known[land], wrong


def reading(rng: random.Random) -> Made:
    town, *others = towns(rng, 4)
    return f"{town.passage()} Who is named as the mayor?", town.mayor, [f"{o.name} {o.river}" for o in others]


SUBJECTS: dict[str, Callable[[random.Random], Made]] = {
    "elementary arithmetic": arithmetic,
    "spelling": first_letters,
    "geography": capitals,
    "reading comprehension": reading,
}


def posed(rng: random.Random, made: Made) -> tuple[str, str]:
    """The question with its four options, and the letter of the right one."""
    question, right, wrong = made
    options = [right, *wrong]
    rng.shuffle(options)
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
    return "\n".join([question, *lines, "Answer:"]), LETTERS[options.index(right)]


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    prefixes = {}
    for subject, ask in SUBJECTS.items():
        shots = [" ".join(posed(rng, ask(rng))) for _ in range(SHOTS)]
        head = f"Exam {tag(rng)}. The following are multiple choice questions (with answers) about {subject}."
        prefixes[subject] = "\n\n".join([head, *shots])
    cases = []
    for i in range(n):
        subject = list(SUBJECTS)[i % len(SUBJECTS)]
        question, letter = posed(rng, SUBJECTS[subject](rng))
        cases.append(w.Case({"examples": prefixes[subject], "question": question}, letter))
    return cases


WORKLOAD = w.Workload(
    name="mmlu",
    source="MMLU, Hendrycks et al., 2021; 5 shots as in SGLang, Zheng et al., 2024, section 6",
    make=make,
    program=program,
    plain=plain,
    check=w.equals,
    count=12,
    quick=6,
    large=4,
    free_tokens=0,
    needs_grammar=True,
)
