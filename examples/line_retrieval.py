"""Line retrieval: one number among many lines (the long-context test of LongChat, 2023).

All questions share the lines, so these are read once however many are asked.

python examples/line_retrieval.py
"""

import random

import phloem
from phloem import function, gen

NAMES = ("apple", "bridge", "candle", "dragon", "engine", "feather", "garden", "hammer", "island", "jacket")


def make_lines(seed=3):
    generator = random.Random(seed)
    return {name: generator.randrange(1000, 10000) for name in NAMES}


@function
def retrieve(s, lines, name):
    s += "Each line has a name and its number.\n\n"
    s += "".join(f"line {key}: the number is {number}\n" for key, number in lines.items())
    s += f"\nline {name}: the number is "
    s += gen("number", regex="[0-9]{4}", temperature=0)


def main(runtime):
    lines = make_lines()
    states = retrieve.run_batch([{"lines": lines, "name": name} for name in lines], backend=runtime)
    right = sum(int(state["number"]) == lines[name] for name, state in zip(lines, states, strict=True))
    for name, state in zip(lines, states, strict=True):
        print(f"{name:8} {state['number']}  {'' if int(state['number']) == lines[name] else f'(was {lines[name]})'}")
    cached = sum(state.stats()["cached_tokens"] for state in states)
    print(f"{right} of {len(lines)} right; {cached} prompt tokens came from the cache")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
