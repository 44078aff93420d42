"""JSON answers of a real model under many schemas: whether all are valid, the cost of masks, the gain of jump-forward.

The same prompts run in three ways: without a grammar, with masks, and with masks and jump-forward, as engines are by
default. Two ways are compared at a time, batch by batch: each of the others against none in one engine, which is alone
as an engine usually is, then jumping against masks in two new engines, in turns. Each batch starts with an empty cache
and runs ``concurrent`` answers at once, without drafts. An answer without a grammar has as many tokens as the one
before it with one, so both ways do the same work except for the masks. The times include compiling each schema, which
the first two batches do.
Nobody judges what answers say.
"""

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
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
    """Distinct schemas: objects of three to six of the fields, and a few other shapes."""
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


@dataclass(slots=True)
class Comparison:
    """The seconds of two ways for answers of the same tokens, by batch."""

    seconds: dict[str, float]
    tokens: int = 0
    forward_rows: Counter[str] = field(default_factory=Counter)
    ratios: list[float] = field(default_factory=list)  # of the first way's speed to the second's
    invalid: list[str] = field(default_factory=list)


def compare(
    engines: dict[str, Any], asked: list[tuple[str, dict[str, Any]]], *, concurrent: int, max_tokens: int
) -> Comparison:
    """Run all requests in two ways, ``masked`` or ``jumping`` the first of them; ``engines`` by way."""
    found = Comparison(dict.fromkeys(engines, 0.0))
    way, other = engines
    for turn, begin in enumerate(range(0, len(asked), concurrent)):
        batch = asked[begin : begin + concurrent]
        seconds: dict[str, float] = {}
        num_tokens = counts = [max_tokens] * len(batch)
        for name in (way, other) if turn % 2 == 0 or other == "free" else (other, way):
            engine, is_free = engines[name], name == "free"
            engine.flush_cache()
            before = engine.metrics()["forward_rows"]
            made, seconds[name] = _run(engine, batch, begin, counts if is_free else num_tokens, masked=not is_free)
            found.forward_rows[name] += engine.metrics()["forward_rows"] - before
            counts = [len(answer.meta.candidates[0].token_ids) for answer in made]
            if not is_free:
                answers = zip(made, batch, strict=True)
                found.invalid += [answer.text for answer, (_, schema) in answers if not _is_valid(answer.text, schema)]
        found.seconds = {name: found.seconds[name] + seconds[name] for name in engines}
        found.tokens += sum(counts)
        found.ratios.append(seconds[other] / seconds[way])
        done = f"{begin + len(batch)} of {len(asked)}"
        print(f"  {done}: {way}/{other} {found.ratios[-1]:.3f}, invalid {len(found.invalid)}")
    return found


def measure_answers(model: str, *, answers: int = 300, concurrent: int = 16, max_tokens: int = 400) -> dict[str, Any]:
    """Figures of one run. Ratios compare tokens per second: the median over batches, and all batches together."""
    asked = list(prompts(answers))

    def started(*, jumps: bool) -> phloem.Engine:
        """An engine that has loaded compiled walks and kernels."""
        engine = phloem.Engine(model, jump_forward=jumps)
        engine.generate(asked[0][0], grammar=_grammar(asked[0][1]), max_tokens=max_tokens, temperature=0.7, seed=1)
        return engine

    def compared(way: str, other: str) -> Comparison:
        engines = {way: started(jumps=way == "jumping")}
        try:
            engines[other] = engines[way] if other == "free" else started(jumps=False)
            return compare(engines, asked, concurrent=concurrent, max_tokens=max_tokens)
        finally:
            for engine in engines.values():
                engine.shutdown()

    jumps = compared("jumping", "masked")
    found_all = [compared("jumping", "free"), compared("masked", "free"), jumps]
    report: dict[str, Any] = {"answers": 4 * answers, "schemas": len(schemas()), "concurrent": concurrent}
    invalid = [text for found in found_all for text in found.invalid]
    report |= {"invalid": len(invalid), "invalid_texts": invalid[:5]}
    for found in found_all:
        way, other = found.seconds
        name = f"{way}_over_{other}"
        report[name] = round(statistics.median(found.ratios), 3)
        report[f"{name}_in_all"] = round(found.seconds[other] / found.seconds[way], 3)
        report[f"{name}_seconds"] = {side: round(value, 2) for side, value in found.seconds.items()}
    rows = jumps.forward_rows["jumping"]
    return report | {"tokens": jumps.tokens, "forwards_per_token_jumping": round(rows / max(jumps.tokens, 1), 3)}


def measure_budgets(model: str, data: Path, *, schemas: int = 100, answers: int = 1000) -> dict[str, Any]:
    """Answers with ``max_tokens`` drawn between the shortest possible and 200, greedy and drawn in turns: how many are
    valid, and whether those that the limit left alone have the tokens of answers with ``finish="cut"``.

    Sums of attention depend on which prompts lie in one step, so two answers of equal requests can part at a near tie.
    So answers that differ are asked again with nothing else running, both ways: only then must their tokens be equal.
    """
    from concurrent.futures import ThreadPoolExecutor

    import jsonschema
    from phloem.constrained import GrammarError, compile
    from phloem.runtime.tokenizer import load_tokenizer
    from phloem.runtime.weights.resolve import resolve_model

    vocabulary = load_tokenizer(resolve_model(model)).vocabulary()
    chosen: list[tuple[str, int, Any]] = []
    with data.open() as lines:
        for line in lines:
            text = json.loads(line)["text"]
            try:
                grammar = compile("json_schema", text, vocabulary)
            except GrammarError:
                continue
            if grammar.least_tokens is not None and grammar.least_tokens <= 200:
                schema = json.loads(text)
                checked = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
                chosen.append((text, grammar.least_tokens, checked))
            if len(chosen) == schemas:
                break
    found: Counter[str] = Counter()
    invalid: list[str] = []
    parted: list[int] = []
    rng = random.Random(0)
    asked = []
    for i in range(answers):
        text, least, checked = chosen[i % len(chosen)]
        options = {"max_tokens": rng.randint(least, 200), "temperature": 0.8 * (i // len(chosen) % 2), "seed": i}
        asked.append((text, options, checked))

    def one(at: int) -> None:
        text, options, checked = asked[at]
        prompt, grammar = f"An example of JSON of the schema {text[:400]}\nJSON: ", GrammarSpec("json_schema", text)
        closed, cut = (
            engine.generate(prompt, grammar=grammar, finish=finish, **options) for finish in ("closed", "cut")
        )
        mine, other = closed.meta.candidates[0], cut.meta.candidates[0]
        try:
            checked.validate(json.loads(closed.text))
            found["valid"] += 1
        except (json.JSONDecodeError, jsonschema.ValidationError) as error:
            invalid.append(
                f"{mine.finish_reason}, max_tokens {options['max_tokens']}: {closed.text} ({str(error)[:100]})"
            )
        found["closed by the limit"] += mine.closed_by_budget
        found["cut without it"] += other.finish_reason == "length"
        if not mine.closed_by_budget:
            found["left alone"] += 1
            if mine.token_ids != other.token_ids:
                found["with other tokens than cut ones"] += 1
                parted.append(at)

    def differs_alone(at: int) -> bool:
        text, options, _ = asked[at]
        prompt, grammar = f"An example of JSON of the schema {text[:400]}\nJSON: ", GrammarSpec("json_schema", text)
        made = []
        for finish in ("closed", "cut"):
            engine.flush_cache()
            answer = engine.generate(prompt, grammar=grammar, finish=finish, **options)
            made.append(answer.meta.candidates[0].token_ids)
        return made[0] != made[1]

    engine = phloem.Engine(model)
    try:
        with ThreadPoolExecutor(16) as pool:
            for done, _ in enumerate(pool.map(one, range(answers)), 1):
                if done % 50 == 0:
                    print(f"  {done} of {answers}: {dict(found)}", flush=True)
        found["with other tokens than cut ones, alone"] = sum(map(differs_alone, parted))
    finally:
        engine.shutdown()
    return {"answers": answers, "schemas": len(chosen), **found, "invalid": len(invalid), "invalid_texts": invalid[:5]}


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    import jsonschema

    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    except json.JSONDecodeError:
        return False


def _grammar(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), {"whitespace": "compact"})


def _run(
    engine: Any, batch: list[tuple[str, dict[str, Any]]], seed: int, counts: list[int], *, masked: bool
) -> tuple[list[Any], float]:
    """The answers to requests sent at once, and the seconds until the last answer."""
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
