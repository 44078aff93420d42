"""What a style of white space does to JSON answers of a model: their length, their likelihood, how many end in time.

    python -m benchmarks.white_space --data schemas.jsonl [--model smollm2] [--schemas 40] [--save]

``--data``: one JSON a line with ``text``, a schema. Objects with ``properties`` get ``additionalProperties: false``, as
clients for structured output send them. Each schema is asked for twice, by the names of its properties and by its own
text, once greedily and once drawn at temperature 0.7. Prompts, seeds and limits are the same in each style, and the
styles take turns batch by batch. An answer is *finished* if it ends within ``--max-tokens``. Its
likelihood is the model's log-probability of its text after the prompt, without a grammar; that of its *value* is of
the value as ``json.dumps`` writes it, so that it is the same text for equal answers. Both are of the prompts whose
answers are finished in every style (*paired*).
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import phloem
from phloem.constrained import GrammarSpec

from . import RESULTS, header, save

STYLES = ("flexible", "compact", "neat")
CONCURRENT = 16
MAX_SCHEMA = 1_200  # characters; longer schemas leave a small model no room


@dataclass(slots=True)
class Answer:
    """One answer of one style. ``logprob``: of its text, 0 unless it is finished."""

    tokens: int
    forced: int
    is_finished: bool
    is_valid: bool
    logprob: float
    value_logprob: float
    num_scored: int
    text: str


@dataclass(slots=True)
class Tally:
    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    def report(self, paired: set[int]) -> dict[str, Any]:
        answers = self.answers
        finished = [a for a in answers if a.is_finished]
        both = [answers[i] for i in sorted(paired)]
        tokens = sum(a.tokens for a in answers)
        return {
            "answers": len(answers),
            "finished": round(len(finished) / len(answers), 3),
            "valid_of_finished": round(sum(a.is_valid for a in finished) / max(len(finished), 1), 3),
            "tokens_per_answer": round(tokens / len(answers), 1),
            "forced_tokens": round(sum(a.forced for a in answers) / tokens, 3),
            "tokens_per_s": round(tokens / self.seconds, 1),
            "answers_finished_per_s": round(len(finished) / self.seconds, 2),
            "paired": {
                "answers": len(both),
                "tokens_per_answer": _mean([a.tokens for a in both]),
                "logprob_per_answer": _mean([a.logprob for a in both]),
                "value_logprob_per_answer": _mean([a.value_logprob for a in both]),
                "logprob_per_token": round(sum(a.logprob for a in both) / max(sum(a.num_scored for a in both), 1), 3),
            },
        }


def _mean(values: list[Any]) -> float:
    return round(statistics.fmean(values), 2) if values else 0.0


def schemas_of(path: Path, count: int) -> list[dict[str, Any]]:
    """``count`` object schemas of the file, evenly spread over those that are short enough."""
    found = []
    with path.open() as lines:
        for line in lines:
            text = json.loads(line)["text"]
            schema = json.loads(text)
            if len(text) <= MAX_SCHEMA and isinstance(schema, dict) and schema.get("properties"):
                found.append(closed(schema))
    return [found[i * len(found) // count] for i in range(min(count, len(found)))]


def closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` wherever properties are listed."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and "type" in schema
    return {**inner, "additionalProperties": False} if is_object else inner


def prompts_of(schema: dict[str, Any]) -> Iterator[str]:
    names = ", ".join(schema["properties"])
    title = schema.get("title") or schema.get("description") or "an example"
    yield f"Write JSON with the fields {names}, for {str(title)[:80]}.\nJSON: "
    yield f"JSON Schema:\n{json.dumps(schema, indent=2)}\n\nA JSON document that follows it:\n"


def measure(model: str, schemas: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    asked = [
        (prompt, schema, 0.7 * ((i + j) % 2))
        for i, schema in enumerate(schemas)
        for j, prompt in enumerate(prompts_of(schema))
    ]
    tallies = {style: Tally() for style in STYLES}
    engine = phloem.Engine(model)
    try:
        _run(engine, asked[:2], "compact", 8, 0)  # compiled walks and kernels are loaded here, not timed
        for turn, begin in enumerate(range(0, len(asked), CONCURRENT)):
            batch = asked[begin : begin + CONCURRENT]
            engine.generate([prompt for prompt, _, _ in batch], max_tokens=1)  # prompts are in the cache for each style
            for i in range(len(STYLES)):
                style = STYLES[(turn + i) % len(STYLES)]
                tally = tallies[style]
                made, seconds = _run(engine, batch, style, max_tokens, begin)
                tally.seconds += seconds
                with ThreadPoolExecutor(CONCURRENT) as pool:
                    tally.answers += pool.map(partial(_judged, engine), batch, made)
            _show(begin + len(batch), len(asked), tallies)
    finally:
        engine.shutdown()
    paired = _finished_in_all(tallies)
    return {
        "model": model,
        "schemas": len(schemas),
        "max_tokens": max_tokens,
        "concurrent": CONCURRENT,
        **{style: tally.report(paired) for style, tally in tallies.items()},
        "unfinished": {s: [a.text for a in t.answers if not a.is_finished][:3] for s, t in tallies.items()},
    }


def _finished_in_all(tallies: dict[str, Tally]) -> set[int]:
    by_prompt = zip(*(tally.answers for tally in tallies.values()), strict=True)
    return {i for i, answers in enumerate(by_prompt) if all(a.is_finished for a in answers)}


def _show(done: int, total: int, tallies: dict[str, Tally]) -> None:
    print(f"{done} of {total}", flush=True)
    for style, tally in tallies.items():
        print(f"  {style}: {tally.report(_finished_in_all(tallies))}", flush=True)


def _run(
    engine: Any, batch: list[tuple[str, dict[str, Any], float]], style: str, max_tokens: int, seed: int
) -> tuple[list[Any], float]:
    """The answers, all at once, and the seconds they took."""

    def one(i: int) -> Any:
        prompt, schema, temperature = batch[i]
        grammar = GrammarSpec("json_schema", json.dumps(schema), {"whitespace": style})
        return engine.generate(prompt, grammar=grammar, max_tokens=max_tokens, temperature=temperature, seed=seed + i)

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(batch)) as pool:
        made = list(pool.map(one, range(len(batch))))
    return made, time.perf_counter() - begin


def _judged(engine: Any, asked: tuple[str, dict[str, Any], float], completion: Any) -> Answer:
    prompt, schema, _ = asked
    candidate = completion.meta.candidates[0]
    is_finished = candidate.finish_reason == "stop"
    logprobs, of_value = [], []
    if is_finished:
        start = completion.meta.prompt_tokens
        logprobs = _logprobs(engine, prompt + completion.text, start)
        of_value = _logprobs(engine, prompt + json.dumps(json.loads(completion.text), ensure_ascii=False), start)
    return Answer(
        candidate.completion_tokens,
        candidate.forced_tokens,
        is_finished,
        is_finished and _is_valid(completion.text, schema),
        sum(logprobs),
        sum(of_value),
        len(logprobs),
        completion.text,
    )


def _logprobs(engine: Any, text: str, start: int) -> list[float]:
    """Of each token of the text from ``start`` on."""
    scored = engine.generate(text, max_tokens=1, return_logprob=True, logprob_start_len=start)
    return [each.logprob for each in scored.meta.prompt_logprobs if each.logprob is not None]


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    import jsonschema

    value = json.loads(text)
    return bool(
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema).is_valid(value)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="schemas, one JSON a line")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemas", type=int, default=40, help="so many schemas of --data (default: 40)")
    parser.add_argument("--max-tokens", type=int, default=100, help="of each answer (default: 100)")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results/white_space.json")
    args = parser.parse_args()
    report = header() | measure(args.model, schemas_of(args.data, args.schemas), args.max_tokens)
    print(json.dumps(report, indent=1))
    if args.save:
        save(RESULTS / "white_space.json", report)


if __name__ == "__main__":
    main()
