"""The ``openai`` client's structured outputs: a pydantic model goes out as the schema and comes back as an object.

phloem serve smollm2 &
python examples/interop/openai_parse.py
"""

import argparse

import openai
from pydantic import BaseModel


class Meeting(BaseModel):
    day: str
    hour: int
    people: list[str]


def main(base_url: str) -> Meeting:
    client = openai.OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    answer = client.chat.completions.parse(
        model=model,
        messages=[
            {"role": "system", "content": "You read notes and fill in forms as JSON."},
            {"role": "user", "content": "On Monday at 9: coffee with Ann"},
            {"role": "assistant", "content": '{"day": "Monday", "hour": 9, "people": ["Ann"]}'},
            {"role": "user", "content": "On Friday at 12: lunch with Tom and Eva"},
        ],
        response_format=Meeting,
        temperature=0,
        max_tokens=60,
    )
    meeting = answer.choices[0].message.parsed
    print(repr(meeting))
    client.close()
    return meeting


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    main(parser.parse_args().base_url)
