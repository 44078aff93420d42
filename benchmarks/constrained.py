"""What grammars cost and whether they are right: verdicts, compile, mask and accept times, ours and installed peers'.

    python -m benchmarks.constrained --data schemas.jsonl --suite draft2020-12/ [--peers] [--save]
    python -m benchmarks.constrained            # the grammars of grammar_texts.py alone
    python -m benchmarks.constrained --data schemas.jsonl --walks 10 --order schema   # random texts, against jsonschema
    python -m benchmarks.constrained --data schemas.jsonl --order schema    # is order why verdicts are wrong?
    python -m benchmarks.constrained --end-to-end      # 300 answers of the model under 30 schemas
    python -m benchmarks.constrained --data schemas.jsonl --budgets    # do answers end within drawn max_tokens?

``--data``: one JSON a line with ``id``, ``text`` (a schema) and ``tests`` ([{text, valid}]), as JSONSchemaBench and
MaskBench have them. ``--suite``: folders of the JSON-Schema-Test-Suite, such as ``tests/draft4`` or, with ``--format
enforce``, ``tests/draft7/optional/format``. A valid instance has to be allowed token by token and to end, else it
counts as *over*-constrained; an invalid one has to be refused somewhere, else as *under*.
Times are of the thread, less what reading its clock costs. Each text is walked twice. *First* are all masks of the
first walk, in the order of the text, also those that an earlier text or place has made; *seen* are those of the second
walk. Each schema's slowest mask and slowest accept are kept with the text before
them; the slowest of all schemas are printed. ``--peers`` measures llguidance and xgrammar in the same way, where they
are installed.
"""

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phloem.constrained import Vocabulary
from phloem.runtime.tokenizer import Tokenizer, load_tokenizer
from phloem.runtime.weights.resolve import resolve_model

from . import RESULTS, header, percentiles
from .constrained_answers import measure_answers, measure_budgets
from .grammar_engines import Engine, Phloem, Refused, Walker, engines
from .grammar_texts import GRAMMARS
from .random_texts import walk_schemas
from .reordered import is_order_alone


@dataclass(frozen=True, slots=True)
class Wrong:
    """An instance that was judged wrongly."""

    name: str
    grammar: str
    instance: str
    is_valid: bool

    def __str__(self) -> str:
        return f"{self.name}: {'over' if self.is_valid else 'under'}: {self.instance[:80]}"


@dataclass(frozen=True, slots=True, order=True)
class Slow:
    """The slowest mask or accept of a grammar, and the text before it."""

    us: float
    what: str
    name: str
    before: str

    def __str__(self) -> str:
        return f"{self.what} {self.us:>9,.0f} us  {self.name}: {len(self.before):,} characters ...{self.before[-60:]!r}"


@dataclass(slots=True)
class Tally:
    """Verdicts and times of one engine on one set of grammars. Times are of the thread, in microseconds."""

    verdicts: Counter[str] = field(default_factory=Counter)
    compile_us: list[float] = field(default_factory=list)
    first_us: list[float] = field(default_factory=list)
    seen_us: list[float] = field(default_factory=list)
    accept_us: list[float] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    slowest: list[Slow] = field(default_factory=list)  # one mask and one accept of each grammar

    def report(self) -> dict[str, Any]:
        return {
            "verdicts": dict(self.verdicts),
            "compile_ms": percentiles([t / 1e3 for t in self.compile_us]),
            "mask_first_us": percentiles(self.first_us),
            "mask_seen_us": percentiles(self.seen_us),
            "accept_us": percentiles(self.accept_us),
            "grammars_with_a_mask_above": {
                f"{ms} ms": sum(s.what == "mask" and s.us > 1e3 * ms for s in self.slowest) for ms in SLOW_MS
            },
        }

    def note_slowest(self, name: str, slow: dict[str, tuple[float, str]]) -> None:
        self.slowest += [Slow(round(us, 1), what, name, before) for what, (us, before) in slow.items()]


def _clock_cost_ns() -> int:
    """What reading the thread's clock twice costs by itself (a system call): subtracted from every time."""
    clock = time.thread_time_ns
    pairs = [-(clock() - clock()) for _ in range(10_001)]
    return sorted(pairs)[5_000]


CLOCK_COST_NS = _clock_cost_ns()
SLOW_MS = (1, 2, 5, 10, 100)
DIALECTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
}  # by folder of the suite; 2020-12 is the dialect of schemas that name none


def walk(make: Callable[[], Walker], tokens: list[int], masks_us: list[float], accepts_us: list[float]) -> bool:
    """Whether the engine takes the text: every token allowed by its mask, and the text may end."""
    clock = time.thread_time_ns
    walker = make()
    for token in tokens:
        begin = clock()
        walker.fill()
        masks_us.append((clock() - begin - CLOCK_COST_NS) / 1e3)
        if not walker.allows(token):
            return False
        begin = clock()
        walker.accept(token)
        accepts_us.append((clock() - begin - CLOCK_COST_NS) / 1e3)
    return walker.may_end()


Case = tuple[str, str, str, list[tuple[str, bool]]]  # name, kind, grammar, instances with their verdicts
CaseSet = tuple[list[Case], dict[str, str]]  # and the options of its JSON schemas


def measure(engine: Engine, cases: Iterable[Case], tokenizer: Tokenizer, options: dict[str, str]) -> Tally:
    tally = Tally()
    verdicts = tally.verdicts
    for name, kind, text, instances in cases:
        begin = time.thread_time_ns()
        try:
            make = engine.compile(kind, text, options if kind == "json_schema" else {})
        except Refused as refusal:
            if "no value satisfies" in str(refusal):
                wrong = [t for t, valid in instances if valid]
                verdicts["correct"] += len(instances) - len(wrong)
                verdicts["over"] += len(wrong)
                continue
            verdicts["refused grammars"] += 1
            verdicts["not run"] += len(instances)
            tally.refusals.append((name, str(refusal)))
            continue
        tally.compile_us.append((time.thread_time_ns() - begin) / 1e3)
        verdicts["grammars"] += 1
        right = True
        slow: dict[str, tuple[float, str]] = {}
        for instance, valid in instances:
            tokens = tokenizer.encode(instance)
            num_masks, num_accepts = len(tally.first_us), len(tally.accept_us)
            taken = walk(make, tokens, tally.first_us, tally.accept_us)
            for what, times in (("mask", tally.first_us[num_masks:]), ("accept", tally.accept_us[num_accepts:])):
                at = max(range(len(times)), key=times.__getitem__, default=-1)
                if at >= 0 and times[at] > slow.get(what, (0.0, ""))[0]:
                    slow[what] = (
                        times[at],
                        b"".join(tokenizer.token_bytes[t] for t in tokens[:at]).decode(errors="replace"),
                    )
            walk(make, tokens, tally.seen_us, [])
            verdict = "correct" if taken == valid else "over" if valid else "under"
            verdicts[verdict] += 1
            if taken != valid:
                right = False
                tally.wrong.append(Wrong(name, text, instance, valid))
        verdicts["grammars without a wrong verdict"] += right
        tally.note_slowest(name, slow)
    return tally


def bench_cases(path: Path, limit: int) -> Iterator[Case]:
    """The cases of a file, one JSON a line, or the schemas of a folder, a file each and without instances."""
    if path.is_dir():
        for file in sorted(path.rglob("*.json"))[:limit]:
            yield file.stem, "json_schema", file.read_text(), []
        return
    with path.open() as lines:
        for number, line in enumerate(lines):
            if number >= limit:
                return
            entry = json.loads(line)
            yield entry["id"], "json_schema", entry["text"], [(t["text"], t["valid"]) for t in entry["tests"]]


def suite_cases(folder: Path) -> Iterator[Case]:
    """The tests of a folder; schemas that do not name their dialect have the one that the folder's path names."""
    uri = next((uri for draft, uri in DIALECTS.items() if draft in folder.parts), None)
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text()):
            tests = [(json.dumps(t["data"], ensure_ascii=False), t["valid"]) for t in group["tests"]]
            schema = group["schema"]
            if uri is not None and isinstance(schema, dict):
                schema = {"$schema": uri, **schema}
            yield f"{path.stem}: {group['description']}", "json_schema", json.dumps(schema), tests


def own_cases() -> Iterator[Case]:
    for name, (kind, text, instances) in GRAMMARS.items():
        yield name, kind, text, [(instance, True) for instance in instances]


def explain(vocabulary: Vocabulary, wrong: list[Wrong], options: dict[str, str]) -> dict[str, int]:
    """Print each instance judged wrongly, with whether it is judged rightly in another order of its properties."""
    by_order = [is_order_alone(vocabulary, w.grammar, w.instance, options) if w.is_valid else False for w in wrong]
    for w, is_order in zip(wrong, by_order, strict=True):
        print(f"    {'order' if is_order else 'NOT ORDER'}: {w}")
    print(f"  judged wrongly: {len(wrong)}, of these rightly in another order of properties: {sum(by_order)}")
    return {"wrong": len(wrong), "right in another order": sum(by_order)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="schemas and instances, one JSON a line; or a folder of schemas")
    parser.add_argument("--suite", type=Path, nargs="+", default=[], help="folders of the JSON-Schema-Test-Suite")
    parser.add_argument(
        "--format", default="annotate", choices=["annotate", "enforce"], help="format in --suite (default: annotate)"
    )
    parser.add_argument("--model", default="smollm2", help="whose tokens (default: smollm2)")
    parser.add_argument("--order", default="any", choices=["any", "schema"], help="property order (default: any)")
    parser.add_argument("--limit", type=int, default=1 << 30, help="at most so many schemas of --data")
    parser.add_argument("--peers", action="store_true", help="measure llguidance and xgrammar too")
    parser.add_argument("--details", action="store_true", help="print every refusal and wrong verdict")
    parser.add_argument("--slowest", type=int, default=10, help="print so many slowest masks and accepts (default: 10)")
    parser.add_argument("--save", action="store_true", help="write the figures to benchmarks/results/constrained.json")
    parser.add_argument(
        "--walks", type=int, default=0, help="so many random walks through each schema of --data instead"
    )
    parser.add_argument("--end-to-end", action="store_true", help="JSON answers of the model itself instead")
    parser.add_argument("--budgets", action="store_true", help="answers to schemas of --data with drawn max_tokens")
    parser.add_argument("--answers", type=int, default=300, help="so many answers of --end-to-end (default: 300)")
    parser.add_argument("--concurrent", type=int, default=16, help="so many at once (default: 16)")
    args = parser.parse_args()
    if args.end_to_end:
        report = header() | measure_answers(args.model, answers=args.answers, concurrent=args.concurrent)
        print(json.dumps(report, indent=2))
        if args.save:
            save("constrained_answers.json", report)
        return
    if args.budgets:
        report = header() | measure_budgets(args.model, args.data, answers=args.answers)
        print(json.dumps(report, indent=2))
        if args.save:
            save("constrained_budgets.json", report)
        return
    tokenizer = load_tokenizer(resolve_model(args.model))
    if args.walks:
        cases = ((name, text) for name, _, text, _ in bench_cases(args.data, args.limit))
        found = walk_schemas(tokenizer.vocabulary(), cases, args.walks, args.order)
        for name, value in found.items():
            print(f"  {name}: {value}")
        return
    sets: dict[str, CaseSet] = {"own grammars": (list(own_cases()), {})}
    given = {"whitespace": "flexible", "numbers": "any"}  # texts that others wrote
    if args.data:
        sets["data"] = list(bench_cases(args.data, args.limit)), {"property_order": args.order, **given}
    for folder in args.suite:
        name = "suite" if len(args.suite) == 1 else f"suite {folder}"
        sets[name] = list(suite_cases(folder)), {"property_order": "any", "format": args.format, **given}
    figures: dict[str, Any] = header()
    for engine in engines(tokenizer, args.peers):
        for title, report in measure_sets(engine, sets, tokenizer, details=args.details, slowest=args.slowest):
            figures.setdefault(title, {})[engine.name] = report
    if args.save:
        save("constrained.json", figures)


def measure_sets(
    engine: Engine, sets: dict[str, CaseSet], tokenizer: Tokenizer, *, details: bool, slowest: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of each set, which are printed too."""
    warm = engine.compile("regex", "[a-c]{2}", {})()  # the compiled walks are loaded here, not timed
    warm.fill()
    warm.accept(tokenizer.encode("a")[0])
    gc.collect()
    gc.disable()  # a server collects between steps, not within one
    for title, (cases, options) in sets.items():
        tally = measure(engine, cases, tokenizer, options)
        report = tally.report()
        print(f"\n{engine.name}, {title}")
        for key, values in report.items():
            print(f"  {key:14}", "  ".join(f"{name} {value}" for name, value in values.items()))
        for slow in sorted(tally.slowest, reverse=True)[:slowest]:
            print(f"    {slow}")
        if details:
            for line in [*(f"{name}: {why[:200]}" for name, why in tally.refusals), *map(str, tally.wrong)]:
                print(f"    {line}")
        if isinstance(engine, Phloem) and options.get("property_order") == "schema":
            report["wrong_by_order"] = explain(engine.vocabulary, tally.wrong, options)
        yield title, report


def save(name: str, report: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
