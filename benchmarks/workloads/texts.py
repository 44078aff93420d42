"""What the cases are made of: invented towns whose facts are known, Python's own documentation, and reference prose.

All of it follows from a seed. Two seeds share no town, so a case of a new seed finds no prefix of an old one.
"""

import inspect
import random
import shutil
import statistics
import textwrap
from dataclasses import dataclass
from typing import Any

from ..prose import DOCUMENT
from .workload import Case

STARTS = ("Al", "Bren", "Cor", "Dal", "Esk", "Fen", "Gar", "Hol", "Ing", "Jor", "Kel", "Lor", "Mar", "Nor", "Os", "Pel")
MIDDLES = ("a", "e", "i", "o", "en", "in", "ar", "el")
ENDS = ("bridge", "ford", "ham", "mouth", "stead", "ton", "wick", "dale")
RIVERS = ("Avel", "Brune", "Carrow", "Dunn", "Erris", "Fallow", "Grane", "Hesper")
TRADES = ("wool", "clocks", "salt", "paper", "glass", "honey", "rope", "tin")
MAYORS = (
    "Ada Quill",
    "Bram Oster",
    "Clara Venn",
    "Dirk Malloy",
    "Edith Crane",
    "Felix Bough",
    "Greta Stone",
    "Hugo Lund",
)
FEATURES = (
    "The market is held on the square in front of the old hall, and on winter evenings lamps burn in every arch.",
    "A ferry crosses the water at noon, and a second one at dusk carries the workers home to the far bank.",
    "The school stands on a hill above the mill, where the wind is strong enough to dry the washing in an hour.",
    "Visitors are shown the clock tower first, whose bell was cast twice because the first one cracked in the frost.",
    "The library keeps a ledger in which every flood is written down together with the names of those who helped.",
    "An avenue of limes leads from the station to the harbour, and its benches are painted green each spring.",
)


@dataclass(frozen=True, slots=True)
class Town:
    """A town that does not exist, with facts that a question can ask for."""

    name: str
    river: str
    trade: str
    mayor: str
    year: int
    feature: str

    def passage(self) -> str:
        """About 75 tokens that state every fact."""
        return (
            f"{self.name} lies on the river {self.river} and was founded in {self.year}. The town lives from "
            f"{self.trade}. Its mayor is {self.mayor}. {self.feature}"
        )

    def questions(self) -> list[tuple[str, str]]:
        """Questions and their answers."""
        return [
            (f"On which river does {self.name} lie?", self.river),
            (f"From what does {self.name} live?", self.trade),
            (f"Who is the mayor of {self.name}?", self.mayor),
            (f"In which year was {self.name} founded?", str(self.year)),
        ]


def towns(rng: random.Random, n: int) -> list[Town]:
    """``n`` towns with different names."""
    names: dict[str, None] = {}
    while len(names) < n:
        names[rng.choice(STARTS) + rng.choice(MIDDLES) + rng.choice(ENDS)] = None
    return [
        Town(
            name,
            rng.choice(RIVERS),
            rng.choice(TRADES),
            rng.choice(MAYORS),
            rng.randrange(1100, 1900),
            rng.choice(FEATURES),
        )
        for name in names
    ]


def tag(rng: random.Random) -> str:
    """A word that makes a prompt of one seed differ from the same prompt of another from its beginning."""
    return f"{rng.choice(STARTS)}{rng.choice(MIDDLES)}-{rng.randrange(1000, 9999)}"


def tool_pages() -> dict[str, str]:
    """Pages of Python's own documentation by the name of their function, each of about 120 tokens."""
    functions: tuple[Any, ...] = (
        *(statistics.harmonic_mean, statistics.median_grouped, textwrap.wrap, textwrap.fill),
        *(textwrap.shorten, textwrap.dedent, shutil.copyfile, shutil.copytree, shutil.rmtree, shutil.move),
        *(inspect.getdoc, inspect.signature),
    )
    return {one.__name__: " ".join((inspect.getdoc(one) or "").split())[:420] for one in functions}


def paragraphs() -> list[str]:
    """The paragraphs of the reference prose, each of about 170 tokens."""
    return DOCUMENT.split("\n\n")


def word_problem(rng: random.Random) -> tuple[str, str]:
    """A problem of two steps with its result, about 50 tokens."""
    crates, size, sold = rng.randrange(3, 10), rng.randrange(11, 30), rng.randrange(5, 30)
    who = rng.choice(MAYORS)
    text = (
        f"{who} of {tag(rng)} has {crates} crates with {size} apples each and sells {sold} apples. "
        "How many apples are left?"
    )
    return text, str(crates * size - sold)


def solved_problems(seed: int, n: int, *, shots: int, task: str) -> list[Case]:
    """Cases with the inputs ``rules``, which are ``task`` and ``shots`` solved problems, and ``problem``."""
    rng = random.Random(seed)
    examples = "\n\n".join(" ".join(word_problem(rng)) for _ in range(shots))
    rules = f"{task} Solved problems:\n\n{examples}"
    made = [word_problem(rng) for _ in range(n)]
    return [Case({"rules": rules, "problem": problem}, result) for problem, result in made]
