"""Parallel sampling with a vote: many answers to one question, the most frequent wins (Wang et al., 2022).

``n=`` samples share the prompt's computation; each has its own random numbers, and a seed makes all repeatable.

python examples/parallel_sampling.py
"""

from collections import Counter

import phloem
from phloem import function, gen

EXAMPLES = """\
Q: Tom has 3 apples and buys 2 more. How many has he?
A: 3 + 2 = 5. The answer is 5.

Q: Ana has 9 pens and gives 4 away. How many has she?
A: 9 - 4 = 5. The answer is 5.

Q: Two boxes hold 6 eggs each. How many eggs are there?
A: 2 * 6 = 12. The answer is 12.

"""


@function
def solve(s, question):
    s += EXAMPLES + f"Q: {question}\nA:"
    s += gen("answer", n=32, max_tokens=24, stop="\n", temperature=0.6, seed=7)


def number_in(answer):
    words = answer.rstrip(". ").split()
    return words[-1] if words and words[-1].isdigit() else None


def main(runtime):
    question = "Mia has 7 books and gets 4 more. How many has she?"
    state = solve.run(question, backend=runtime)
    votes = Counter(number_in(answer) for answer in state["answer"])
    print(question)
    for number, count in votes.most_common():
        print(f"{count:2}x {number}")
    print(f"the vote: {votes.most_common(1)[0][0]}")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
