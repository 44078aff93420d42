"""The papers' workloads, as programs and the plain way, on Phloem and on other engines.

    python -m benchmarks.workloads --all --save      # the tables of two models, in under an hour on two cores
    python -m benchmarks.workloads --quick           # fewer programs and the systems of the bars, in five minutes
    python -m benchmarks.workloads --quick --ablations                                              # in eight
    python -m benchmarks.workloads mmlu react --systems program,http --repeats 3

Systems: ``program`` (ours, whole programs), ``http`` (ours, the plain way), ``http-no-cache`` (the same without a
prefix cache), ``llama.cpp`` (its server), ``openvino`` (GenAI with continuous batching and prefix cache),
``transformers`` (a few cases of two workloads). All but the last stay up and run in turn on the same cases. A system
that fails is named, and the others go on. Where other engines are is said as in ``benchmarks.vs_peers``; those that
are not installed are left out.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phloem import processor

from .. import header
from . import ablations, page
from .catalogue import WORKLOADS
from .held import OUT, keep
from .measure import BARS, Found, as_json, count_faults, judged, measure, same_answers, start, stop, supports, table
from .systems import COMPARED, HTTP, PROGRAM, SYSTEMS, TRANSFORMERS, Peers, System, make_system
from .workload import Workload

MODELS = ("smollm2", "qwen2.5-coder-1.5b")  # of --all
LARGE_BYTES = 400e6  # of weights: a larger model runs fewer programs


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workloads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads: " + ", ".join(WORKLOADS))
    parser.add_argument("--all", action="store_true", help="every workload, in full unless --quick")
    parser.add_argument("--quick", action="store_true", help="fewer programs; every workload, unless some are named")
    parser.add_argument(
        "--systems",
        help=f"comma-separated: {', '.join(SYSTEMS)} (default: all; with --quick {', '.join(COMPARED)})",
    )
    parser.add_argument(
        "--model",
        help=f"aliases or .gguf files, comma-separated (default: {MODELS[0]}; with --all {', '.join(MODELS)})",
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each workload on each system")
    parser.add_argument("--threads", type=int, default=processor.num_cores(), help="of every engine")
    parser.add_argument("--ablations", action="store_true", help="our engine without each of its parts, instead")
    parser.add_argument(
        "--save", action="store_true", help=f"write the figures to {OUT.name}, beside those it holds, and the page"
    )
    parser.add_argument("--llama-server", default=os.environ.get("LLAMA_SERVER", ""))
    parser.add_argument("--openvino-python", default=os.environ.get("OPENVINO_PYTHON", ""))
    parser.add_argument("--transformers-python", default=os.environ.get("TRANSFORMERS_PYTHON", ""))
    args = parser.parse_args(argv)
    asked = COMPARED if args.quick else SYSTEMS
    args.systems = list(asked) if args.systems is None else [name.strip() for name in args.systems.split(",")]
    for given, known in ((args.names, WORKLOADS), (args.systems, SYSTEMS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is not one of: {', '.join(known)}")
    if args.all and args.names:
        parser.error(f"--all and {args.names[0]}: give either")
    if not (args.all or args.quick or args.names):
        parser.error("give --all, --quick or the names of workloads")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    args.names = args.names or list(WORKLOADS)
    args.models = (
        args.model.split(",") if args.model else list(MODELS if args.all and not args.ablations else MODELS[:1])
    )
    return args


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    begin_s = time.perf_counter()
    failed = []
    for model in args.models:
        try:
            (ablate if args.ablations else compare)(args, model)
        except (SystemExit, Exception):
            say(f"{model} failed:\n{traceback.format_exc()}")
            failed.append(model)
        say(f"{time.perf_counter() - begin_s:.0f} s in all")
    return 1 if failed else 0


def compare(args: argparse.Namespace, model: str) -> None:
    """Measure every workload with ``model`` on every system that is installed and starts, and print the tables."""
    from phloem.runtime.weights.resolve import resolve_model

    path = resolve_model(model)
    is_large = size_bytes(path) > LARGE_BYTES
    count = counts(args, is_large)
    workloads = [one for one in map(WORKLOADS.__getitem__, args.names) if count(one)]
    peers = Peers(args.llama_server, args.openvino_python, args.transformers_python)
    made = {name: make_system(name, model, path, args.threads, peers) for name in args.systems}
    about = header() | {"model": model, "repeats": args.repeats, "quick": args.quick}
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n", flush=True)
    if missing := [name for name, system in made.items() if system is None]:
        say(f"not installed: {', '.join(missing)}")
    if left_out := [name for name in args.names if WORKLOADS[name] not in workloads]:
        say(f"left out with a model of this size: {', '.join(left_out)}")
    together = [system for name, system in made.items() if system is not None and name != TRANSFORMERS]
    last = made.get(TRANSFORMERS)  # slow and large: when the others' memory is free
    found: Found = {}
    equal: dict[str, tuple[int, int]] = {}
    versions: dict[str, str] = {}

    def kept(new: Found) -> None:
        for name, row in new.items():
            found.setdefault(name, {}).update(row)
        if args.save:
            keep(OUT, model, about | {"versions": versions}, as_json(found), equal)

    alone = 1 if args.quick or is_large else 2  # programs of a repeat that run one after the other, for the latency
    for group in (together, [last] if last is not None else []):
        running: list[System] = []
        theirs = [one for one in workloads if any(supports(system.name, one) for system in group)]
        try:
            running += (system for system in group if theirs and start(system, say))
            versions |= {system.name: system.version for system in running}
            measure(running, theirs, repeats=args.repeats, alone=alone, count=count, say=say, keep=kept)
            equal |= answers_of(running, theirs, lambda one: -(-count(one) // 2))
        finally:
            for system in running:
                stop(system, say)
    kept({})
    print("", *table(found, list(versions)), "", sep="\n")
    print(*(judged(found, bar) for bar in BARS), sep="\n")
    if equal:
        same, asked = (sum(column) for column in zip(*equal.values(), strict=True))
        print(f"greedy answers by program that equal those by HTTP: {same} of {asked}")
    for fault in count_faults(found, WORKLOADS):
        print(f"other work: {fault}")
    if args.save:
        print("written:", OUT, *page.write())


def answers_of(
    systems: list[System], workloads: list[Workload], count: Callable[[Workload], int]
) -> dict[str, tuple[int, int]]:
    """By workload (equal answers, answers) of ours by program and by HTTP, where both run; a fault is said."""
    by_name = {system.name: system for system in systems}
    if PROGRAM not in by_name or HTTP not in by_name:
        return {}
    begin_s, equal = time.perf_counter(), {}
    for workload in workloads:
        try:
            equal[workload.name] = same_answers(by_name[PROGRAM], by_name[HTTP], workload, count(workload))
        except Exception:
            say(f"{workload.name}: answers were not compared:\n{traceback.format_exc()}")
    say(f"answers compared: {time.perf_counter() - begin_s:.0f} s")
    return equal


def size_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(one.stat().st_size for one in path.rglob("*.safetensors"))


def counts(args: argparse.Namespace, is_large: bool) -> Callable[[Workload], int]:
    return lambda workload: workload.large if is_large else workload.quick if args.quick else workload.count


def say(text: str) -> None:
    print(text, flush=True)


def ablate(args: argparse.Namespace, model: str) -> None:
    about: dict[str, Any] = header() | {"model": model, "repeats": args.repeats, "quick": args.quick}
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n", flush=True)
    found = ablations.measure_ablations(
        model,
        [WORKLOADS[name] for name in args.names],
        threads=args.threads,
        repeats=args.repeats,
        count=counts(args, False),
        tight_count=lambda workload: workload.count,
        say=say,
    )
    print("", *ablations.table(found), "", sep="\n")
    if args.save:
        keep(OUT, model, about, as_json(found), {}, part="ablations")
        print("written:", OUT, *page.write())


if __name__ == "__main__":
    sys.exit(main())
