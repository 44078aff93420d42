"""Tips, each expanded by a fork of its own, then summed up: the program of SGLang's paper (Zheng et al., 2023).

Forks, join and summary travel as one message: ``ref`` pastes texts that do not exist yet. A regex keeps
each text to one sentence.

python examples/tip_suggestion.py
"""

import phloem
from phloem import function, gen

EXAMPLE = """\
Here are two tips for a clean kitchen: wash up at once, and keep the table free.
Tip: wash up at once. Food that dries on a plate is hard to get off, so rinse it while it is fresh.
Tip: keep the table free. On an empty table crumbs are easy to see and to wipe away.
In short: rinse early and put things away, and the kitchen stays clean by itself.

"""
SENTENCE = r" [A-Za-z][a-z ,]{20,100}\."
TIPS = ("eat more vegetables", "walk every day")


@function
def tip_suggestion(s):
    s += EXAMPLE + f"Here are two tips for a healthy life: {TIPS[0]}, and {TIPS[1]}.\n"
    forks = s.fork(len(TIPS))
    for fork, tip in zip(forks, TIPS, strict=True):
        fork += f"Tip: {tip}."
        fork += gen("detail", regex=SENTENCE, temperature=0)
    forks.join()
    for fork, tip in zip(forks, TIPS, strict=True):
        s += f"Tip: {tip}." + fork.ref("detail") + "\n"
    s += "In short:" + gen("summary", regex=SENTENCE, temperature=0)


def main(runtime):
    state = tip_suggestion.run(backend=runtime)
    for tip, detail in zip(TIPS, state["detail"], strict=True):
        print(f"{tip}: {detail.strip()}")
    print(f"In short: {state['summary'].strip()}")
    print(f"({state.stats()['messages']} message)")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
