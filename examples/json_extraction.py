"""Structured extraction into pydantic models: what comes back is an object, checked as it was written.

python examples/json_extraction.py
"""

from typing import Annotated

import phloem
from phloem import function, gen
from pydantic import BaseModel, Field


class Event(BaseModel):
    title: Annotated[str, Field(max_length=30)]
    day: Annotated[int, Field(ge=1, le=31)]
    month: Annotated[str, Field(pattern="^(January|February|March|April|May|June|July|August|October|December)$")]
    people: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=4)]


EXAMPLES = """\
Note: Chess with Ben on 12 March.
Event: {"title": "Chess", "day": 12, "month": "March", "people": ["Ben"]}

Note: On 7 October I have a dinner with Eva, Max and Kim.
Event: {"title": "Dinner", "day": 7, "month": "October", "people": ["Eva", "Max", "Kim"]}

Note: Dentist on 2 July
Event: {"title": "Dentist", "day": 2, "month": "July", "people": []}

"""
NOTES = ["Lunch with Tom on 3 May.", "On 24 December there is a concert with Mia.", "Tennis on 9 June with Leo."]


@function
def extract(s, note):
    s += EXAMPLES + f"Note: {note}\nEvent: " + gen("event", Event, max_tokens=64, temperature=0)


def main(runtime):
    for note, state in zip(NOTES, extract.run_batch([{"note": note} for note in NOTES], backend=runtime), strict=True):
        event = state["event"]
        print(f"{note}\n  {event.day} {event.month}: {event.title}, with {', '.join(event.people) or 'nobody'}")


if __name__ == "__main__":
    with phloem.Runtime(model="smollm2") as runtime:
        main(runtime)
