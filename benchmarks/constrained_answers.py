"""JSON answers of a real model under many schemas: are all valid, what do masks cost, what does jumping forward save.

The same prompts run free, masked, and masked with jump-forward, in turns, ``concurrent`` at a time. The free answers
have as many tokens as the masked ones, so that both do the same work but for the masks. Never looks at what is said.
"""

import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import phloem
from phloem.constrained import GrammarSpec

FIELDS: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 30},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "price": {"type": "number", "minimum": 0, "maximum": 1000},
    "kind": {"enum": ["person", "place", "thing", "event"]},
    "is_open": {"type": "boolean"},
    "date": {"type": "string", "format": "date"},
    "email": {"type": "string", "format": "email", "maxLength": 40},
    "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    "place": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["NO", "FR", "JP", "BR"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    },
    "score": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 40}]},
}
SUBJECTS = (
    "a lighthouse",
    "a teacher",
    "a concert",
    "a bicycle",
    "a harbour",
    "a baker",
    "a storm",
    "a library",
    "a train",
)


def schemas(count: int = 30) -> list[dict[str, Any]]:
    """Objects of three to six of the fields, and a few other shapes, no two alike."""
    names = list(FIELDS)
    out: list[dict[str, Any]] = []
    for i in range(count):
        chosen = [names[(i + j * (1 + i // len(names))) % len(names)] for j in range(3 + i % 4)]
        chosen = list(dict.fromkeys(chosen))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: FIELDS[name] for name in chosen},
            "required": chosen[: 1 + len(chosen) // 2] if i % 3 == 0 else chosen,
            "additionalProperties": False,
        }
        out.append({"type": "array", "items": schema, "minItems": 1, "maxItems": 2} if i % 10 == 9 else schema)
    return out


def prompts(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    made = schemas()
    for i in range(count):
        schema = made[i % len(made)]
        subject = SUBJECTS[(i // len(made)) % len(SUBJECTS)]
        yield f"Describe {subject} as JSON with these fields: {', '.join(FIELDS)}.\nJSON: ", schema


def measure_answers(model: str, *, answers: int = 300, concurrent: int = 16, max_tokens: int = 400) -> dict[str, Any]:
    """Figures of one run; ratios are medians over batches, each of which ran free, masked and jumping in turn."""
    import jsonschema

    asked = list(prompts(answers))
    plain, jumping = phloem.Engine(model, jump_forward=False), phloem.Engine(model, jump_forward=True)
    invalid: list[str] = []
    kept: list[float] = []
    gained: list[float] = []
    tokens = rows = 0
    seconds = {"free": 0.0, "masked": 0.0, "jumping": 0.0}
    try:
        for engine in (plain, jumping):  # compiled walks and kernels are loaded here, not timed
            engine.generate(asked[0][0], grammar=_grammar(asked[0][1]), max_tokens=max_tokens, temperature=0.7, seed=1)
        for begin in range(0, answers, concurrent):
            batch = asked[begin : begin + concurrent]
            made, masked_s = _run(plain, batch, begin, [max_tokens] * len(batch), masked=True)
            counts = [len(answer.meta.candidates[0].token_ids) for answer in made]
            _, free_s = _run(plain, batch, begin, counts, masked=False)
            before = jumping.metrics()["forward_rows"]
            jumped, jumping_s = _run(jumping, batch, begin, [max_tokens] * len(batch), masked=True)
            rows += jumping.metrics()["forward_rows"] - before
            tokens += sum(len(answer.meta.candidates[0].token_ids) for answer in jumped)
            kept.append(free_s / masked_s)
            gained.append(masked_s / jumping_s)
            for name, value in (("free", free_s), ("masked", masked_s), ("jumping", jumping_s)):
                seconds[name] += value
            for answer, (_, schema) in zip([*made, *jumped], [*batch, *batch], strict=True):
                validator = jsonschema.Draft202012Validator(schema)
                try:
                    valid = validator.is_valid(json.loads(answer.text))
                except json.JSONDecodeError:
                    valid = False
                if not valid:
                    invalid.append(answer.text)
            print(f"  {begin + len(batch)} of {answers}: masked/free {kept[-1]:.3f}, invalid {len(invalid)}")
    finally:
        plain.shutdown()
        jumping.shutdown()
    return {
        "answers": 2 * answers,
        "schemas": len(schemas()),
        "concurrent": concurrent,
        "invalid": len(invalid),
        "invalid_texts": invalid[:5],
        "masked_over_free_tokens_per_s": round(statistics.median(kept), 3),
        "jumping_over_masked_tokens_per_s": round(statistics.median(gained), 3),
        "forwards_per_token_jumping": round(rows / max(tokens, 1), 3),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }


def _grammar(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), {"whitespace": "compact"})


def _run(
    engine: Any, batch: list[tuple[str, dict[str, Any]]], seed: int, counts: list[int], *, masked: bool
) -> tuple[list[Any], float]:
    """The answers, all at once, and the seconds they took."""
    from concurrent.futures import ThreadPoolExecutor

    def one(i: int) -> Any:
        text, schema = batch[i]
        options: dict[str, Any] = {"temperature": 0.7, "seed": seed + i, "max_tokens": counts[i], "speculative": False}
        if masked:
            return engine.generate(text, grammar=_grammar(schema), **options)
        return engine.generate(text, ignore_eos=True, **options)

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(batch)) as pool:
        made = list(pool.map(one, range(len(batch))))
    return made, time.perf_counter() - begin
