"""A model as a judge: a review is judged on several dimensions at once, then a verdict follows as JSON.

Branch-solve-merge (Saha et al., 2023): each dimension is a fork. Mark and verdict are typed: they arrive as an
enum member and an object.

python examples/llm_judge.py
"""

from enum import Enum

import phloem
from phloem import function, gen
from pydantic import BaseModel


class Mark(Enum):
    GOOD = "good"
    BAD = "bad"


class Verdict(BaseModel):
    stars: int
    again: bool


JUDGED = {  # review: food, service, verdict
    "The soup was cold, but the waiter was kind.": ("bad", "good", '{"stars": 3, "again": false}'),
    "Great pizza! We waited an hour and nobody said sorry.": ("good", "bad", '{"stars": 3, "again": true}'),
    "Wonderful cake and a friendly smile.": ("good", "good", '{"stars": 5, "again": true}'),
    "Burnt meat and a rude cook.": ("bad", "bad", '{"stars": 1, "again": false}'),
}
REVIEWS = ("Delicious fish, and they were so helpful.", "The rice was raw and the waitress shouted at us.")


def example(review, food=None, service=None, verdict=None):
    lines = [f"Review: {review}"]
    lines += [f"{name}: {mark}" for name, mark in (("food", food), ("service", service), ("verdict", verdict)) if mark]
    return "\n".join(lines) + "\n"


@function
def judge(s, review):
    forks = s.fork(2)
    for i, (fork, dimension) in enumerate(zip(forks, ("food", "service"), strict=True)):
        fork += "\n".join(example(text, **{dimension: marks[i]}) for text, marks in JUDGED.items())
        fork += f"\nReview: {review}\n{dimension}: " + gen("mark", Mark, temperature=0)
    forks.join()
    s += "\n".join(example(text, *marks) for text, marks in JUDGED.items())
    s += f"\nReview: {review}\nfood: " + forks[0].ref("mark") + "\nservice: " + forks[1].ref("mark") + "\nverdict: "
    s += gen("verdict", Verdict, max_tokens=32, temperature=0)


def main(runtime):
    for review, state in zip(REVIEWS, judge.run_batch([{"review": r} for r in REVIEWS], backend=runtime), strict=True):
        food, service = state["mark"]
        verdict = state["verdict"]
        print(f"{review}\n  food {food.value}, service {service.value}")
        print(f"  {verdict.stars} stars, {'again' if verdict.again else 'not again'}")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
