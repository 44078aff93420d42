"""HellaSwag-like: the sensible ending of a story among four, after twenty solved examples.

The program scores the letters of the four endings with ``select``. A chat API scores no given text, so the plain form
lets the model write one of the letters; both take the likeliest letter. HellaSwag (Zellers et al., 2019), 20 shots as
in section 6 of the SGLang paper.
"""

import random
from typing import Any

from phloem import assistant, function, select, system, user

from . import workload as w
from .texts import tag

SHOTS = 20


@function
def program(s: Any, examples: str, story: str) -> None:
    s += system(examples)
    s += user(story)
    s += assistant(select("answer", choices=["A", "B", "C", "D"]))


async def plain(client: w.Client, examples: str, story: str) -> str:
    return await client.chat([w.system(examples), w.user(story)], 4, regex="[ABCD]")


# -- cases ------------------------------------------------------------------------------------------------------------

PEOPLE = ("A man", "A woman", "The boy", "The girl", "An old sailor", "My neighbour", "The student", "A tall cook")
STORIES = (
    ("fills a kettle with water and puts it on the stove.", "waits until the water boils and makes tea."),
    ("ties a pair of running shoes and walks to the start of the race.", "begins to run when the whistle blows."),
    ("opens an umbrella because dark clouds have come.", "walks home through the rain and stays dry."),
    ("spreads butter on a slice of bread.", "eats the bread with a cup of milk."),
    ("puts a stamp on a letter and goes out.", "drops the letter into the box at the corner."),
    ("rolls a big ball of snow and sets a smaller one on top.", "gives the snowman a carrot for a nose."),
    ("hears the telephone ring in the hall.", "picks up the receiver and says hello."),
    ("buys a ticket and waits on the platform.", "steps into the train when the doors open."),
    ("takes a brush and a pot of white paint to the fence.", "paints the fence from one end to the other."),
    ("throws a stick across the meadow for the dog.", "calls when the dog comes back with the stick."),
    ("lights the candles on a birthday cake.", "sings while the child blows the candles out."),
    ("plants a row of beans behind the house.", "waters the beans every evening until they sprout."),
    ("sits down at the piano and opens a book of songs.", "plays the first song slowly with both hands."),
    ("finds a wallet on the pavement with a name in it.", "brings the wallet back to its owner."),
    ("switches the light off and lies down in bed.", "falls asleep after a few minutes."),
    ("fastens a worm to the hook and throws the line out.", "pulls a small fish out of the lake."),
)


def posed(rng: random.Random, story: tuple[str, str]) -> tuple[str, str]:
    begin, right = story
    endings = [right, *rng.sample([end for _, end in STORIES if end != right], 3)]
    rng.shuffle(endings)
    lines = [f"{letter}. {end}" for letter, end in zip("ABCD", endings, strict=True)]
    return "\n".join([f"{rng.choice(PEOPLE)} {begin} Then?", *lines, "Answer:"]), "ABCD"[endings.index(right)]


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    shots = [" ".join(posed(rng, rng.choice(STORIES))) for _ in range(SHOTS)]
    examples = "\n\n".join([f"Test {tag(rng)}. Choose the ending that follows.", *shots])
    found = [posed(rng, rng.choice(STORIES)) for _ in range(n)]
    return [w.Case({"examples": examples, "story": story}, letter) for story, letter in found]


WORKLOAD = w.Workload(
    name="hellaswag",
    source="HellaSwag, Zellers et al., 2019; 20 shots as in SGLang, Zheng et al., 2024, section 6",
    make=make,
    program=program,
    plain=plain,
    check=w.equals,
    count=6,
    quick=1,
    large=3,
    free_tokens=0,
    needs_grammar=True,
)
