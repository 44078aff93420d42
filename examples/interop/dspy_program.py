"""DSPy over a local server: typed signatures. DSPy sends no schema for this model, so it checks the answers itself.

pip install dspy
phloem serve smollm2 &
python examples/interop/dspy_program.py
"""

import argparse

import dspy


class Person(dspy.Signature):
    """Find the person's name and age."""

    sentence: str = dspy.InputField()
    name: str = dspy.OutputField()
    age: int = dspy.OutputField()


def main(base_url: str, model: str = "smollm2") -> dict[str, int]:
    lm = dspy.LM(f"openai/{model}", api_base=base_url, api_key="none", temperature=0, max_tokens=60, cache=False)
    find = dspy.Predict(Person)
    find.demos = [
        dspy.Example(sentence="Ann Lee is a nurse of 31.", name="Ann Lee", age=31),
        dspy.Example(sentence="At 58, Omar Haddad still plays football.", name="Omar Haddad", age=58),
    ]
    ages = {}
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        for sentence in ("Tom Becker is a driver of 44.", "At 23, Aiko Mori paints."):
            found = find(sentence=sentence)
            ages[found.name] = found.age
            print(f"{sentence:32} {found.name}, {found.age}")
    return ages


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    main(parser.parse_args().base_url)
