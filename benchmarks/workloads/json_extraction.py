"""JSON out of a text: the facts about a town, by a regex and by a JSON schema.

JSON decoding as in section 6 of the SGLang paper. A value is right if it is the one that the text states.
"""

import json
import random
from typing import Any

from phloem import assistant, function, gen, system, user

from . import workload as w
from .texts import tag, towns

MAX_TOKENS = 96
REGEX = (
    r'\{"town": "[A-Z][a-z]{3,14}", "river": "[A-Z][a-z]{3,9}", "founded": 1[0-9]{3}, "trade": "[a-z]{3,8}", '
    r'"mayor": "[A-Z][a-z]{2,9} [A-Z][a-z]{2,9}"\}'
)
SCHEMA = {
    "type": "object",
    "properties": {
        "town": {"type": "string", "maxLength": 16},
        "river": {"type": "string", "maxLength": 10},
        "founded": {"type": "integer", "minimum": 1000, "maximum": 1999},
        "trade": {"type": "string", "maxLength": 8},
        "mayor": {"type": "string", "maxLength": 20},
    },
    "required": ["town", "river", "founded", "trade", "mayor"],
    "additionalProperties": False,
}


@function
def by_regex(s: Any, rules: str, text: str) -> None:
    s += system(rules)
    s += user(text)
    s += assistant(gen("answer", max_tokens=MAX_TOKENS, regex=REGEX))


@function
def by_schema(s: Any, rules: str, text: str) -> None:
    s += system(rules)
    s += user(text)
    s += assistant(gen("answer", max_tokens=MAX_TOKENS, json_schema=SCHEMA))


async def plain_by_regex(client: w.Client, rules: str, text: str) -> str:
    return await client.chat([w.system(rules), w.user(text)], MAX_TOKENS, regex=REGEX)


async def plain_by_schema(client: w.Client, rules: str, text: str) -> str:
    return await client.chat([w.system(rules), w.user(text)], MAX_TOKENS, schema=SCHEMA)


def make(seed: int, n: int) -> list[w.Case]:
    rng = random.Random(seed)
    *asked, first, second = towns(rng, n + 2)

    def record(town: Any) -> dict[str, Any]:
        return {
            "town": town.name,
            "river": town.river,
            "founded": town.year,
            "trade": town.trade,
            "mayor": town.mayor,
        }

    examples = "\n\n".join(f"{one.passage()}\n{json.dumps(record(one))}" for one in (first, second))
    rules = f"Register {tag(rng)}. Write the facts of the text as JSON, as in these examples.\n\n{examples}"
    return [w.Case({"rules": rules, "text": town.passage()}, record(town)) for town in asked]


def make_by_schema(seed: int, n: int) -> list[w.Case]:
    """Other texts than by regex, so that no cache holds their prefix."""
    return make(seed + 10_000_000, n)


def check(answer: str, expected: dict[str, Any]) -> bool:
    try:
        return json.loads(answer) == expected
    except json.JSONDecodeError:
        return False


BY_REGEX = w.Workload(
    name="json_regex",
    source="JSON decoding by a regex, SGLang, Zheng et al., 2024, section 6",
    make=make,
    program=by_regex,
    plain=plain_by_regex,
    check=check,
    count=8,
    quick=3,
    large=4,
    free_tokens=0,
    needs_grammar=True,
)
BY_SCHEMA = w.Workload(
    name="json_schema",
    source="JSON decoding by a schema, after SGLang, Zheng et al., 2024, section 6",
    make=make_by_schema,
    program=by_schema,
    plain=plain_by_schema,
    check=check,
    count=8,
    quick=3,
    large=4,
    free_tokens=0,
    needs_grammar=True,
)
