"""Structured extraction: the answer is JSON that follows the schema, because no other token can be chosen.

python examples/extract.py
"""

import argparse
import json

import phloem
from phloem import assistant, function, gen, system, user

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["invoice", "reminder", "order"]},
        "amount": {"type": "number", "minimum": 0},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
    },
    "required": ["name", "kind", "amount", "currency"],
    "additionalProperties": False,
}
QUESTION = "Who sent this letter, what is it, and over how much money? Answer in JSON.\n"
LETTERS = [
    "Dear Ms Lee, please find attached our invoice for 120.50 EUR. Kind regards, Orchard Supplies",
    "Hello, this is a reminder that 80 USD are still open. Yours, Northside Gym",
    "We would like to order ten crates of apples at 15 GBP in total. The Corner Bakery",
]


@function
def extract(s, letter):
    s += system("You read letters and fill in forms.")
    s += user(f"{QUESTION}Letter: Please find our invoice over 35 GBP. Yours, Miller & Sons")
    s += assistant('{"name": "Miller & Sons", "kind": "invoice", "amount": 35, "currency": "GBP"}')
    s += user(f"{QUESTION}Letter: {letter}")
    s += assistant(gen("form", max_tokens=80, temperature=0, json_schema=json.dumps(SCHEMA)))


def main(model: str) -> None:
    with phloem.Runtime(model=model) as runtime:
        for state in extract.run_batch([{"letter": letter} for letter in LETTERS], backend=runtime):
            print(json.dumps(json.loads(state["form"])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    main(parser.parse_args().model)
