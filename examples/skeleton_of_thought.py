"""Skeleton of thought (Ning et al., 2023): first the points, then all of them written out at the same time.

python examples/skeleton_of_thought.py
"""

import phloem
from phloem import function, gen

NUM_POINTS = 3
EXAMPLE = """\
Question: How do I learn a language?
Points:
1. Speak every day
2. Read easy books
3. Learn a few words daily
Point 1. Speak every day. Talk to people who know the language, even if you make mistakes.

Question: How do I save money?
Points:
1. Cook at home
2. Buy used things
3. Take the bus
Point 2. Buy used things. Clothes and books cost half as much when somebody has used them before.

"""


@function
def skeleton_of_thought(s, question):
    s += EXAMPLE + f"Question: {question}\nPoints:\n"
    for i in range(NUM_POINTS):
        s += f"{i + 1}." + gen(f"point_{i}", max_tokens=10, stop="\n", temperature=0) + "\n"
    forks = s.fork(NUM_POINTS)
    for i, fork in enumerate(forks):
        fork += f"Point {i + 1}." + fork.ref(f"point_{i}") + "."
        fork += gen("sentence", regex=r" [A-Z][a-z ,]{20,100}\.", temperature=0)
    forks.join()


def main(runtime):
    question = "How do I sleep better?"
    print(question)
    state = skeleton_of_thought.run(question, backend=runtime)
    for i, sentence in enumerate(state["sentence"]):
        print(f"{i + 1}. {state[f'point_{i}'].strip()}: {sentence.strip()}")
    print(f"({state.stats()['messages']} message)")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
