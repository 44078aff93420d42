"""Tree of thought (Yao et al., 2023): propose several next steps, judge each, go on from the best.

The proposals of a level are forks of one state, and a judgement is a fork of its proposal: what they share is computed
once. Each level is one message.

python examples/tree_of_thought.py
"""

import math

import phloem
from phloem import function, gen, select

EXAMPLE = """\
Plan: paint a room
Step 1: Buy paint, a brush and a roller.
Step 2: Cover the floor and the furniture.
Step 3: Paint the walls from top to bottom.

"""


@function
def tree_of_thought(s, task, depth=3, width=4):
    s += EXAMPLE + f"Plan: {task}\n"
    levels = []
    for level in range(1, depth + 1):
        s += f"Step {level}:"
        proposals = s.fork(width)
        judges = []
        for proposal in proposals:
            proposal += gen("step", max_tokens=24, stop="\n", temperature=0.8)
            (judge,) = proposal.fork(1)
            judge += f"\n\nIs this a good plan to {task}, without repetition? The answer is"
            judge += select("verdict", choices=[" yes", " no"])
            judges.append(judge)
        ranked = sorted(zip(map(yes, judges), (p["step"] for p in proposals), strict=True), reverse=True)
        levels.append(ranked)
        s += ranked[0][1] + "\n"
    return levels


def yes(judge):
    """The probability of "yes" against "no"."""
    scores = judge.get_meta_info("verdict")["normalized_prompt_logprobs"]
    likely, unlikely = (math.exp(score) for score in scores)
    return likely / (likely + unlikely)


def main(runtime):
    task = "plant a tree"
    print(f"Plan: {task}")
    state = tree_of_thought.run(task, backend=runtime, seed=1)
    for level, ranked in enumerate(state.ret_value, 1):
        for i, (score, step) in enumerate(ranked):
            print(f"{'*' if i == 0 else ' '} step {level}, yes {score:.0%}: {step.strip()}")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
