"""The papers' workloads, as programs and the plain way, on Phloem and on other engines.

    python -m benchmarks.workloads --all --save      # the table, in under an hour on two cores
    python -m benchmarks.workloads --quick           # fewer programs and the systems of the bars, in five minutes
    python -m benchmarks.workloads --quick --ablations                                              # in eight
    python -m benchmarks.workloads mmlu react --systems program,http --repeats 3

Systems: ``program`` (ours, whole programs), ``http`` (ours, the plain way), ``http-no-cache`` (the same without a
prefix cache), ``llama.cpp`` (its server), ``openvino`` (GenAI with continuous batching and prefix cache),
``transformers`` (a few cases of two workloads). All run in turn on the same cases. Where other engines are is said as
in ``benchmarks.vs_peers``; those that are not installed are left out.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from phloem import processor

from .. import header
from . import ablations, page
from .catalogue import WORKLOADS
from .held import OUT, keep
from .measure import BARS, as_json, count_faults, judged, measure, same_answers, table
from .systems import COMPARED, HTTP, PROGRAM, SYSTEMS, Peers, System, make_system
from .workload import Workload


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
    parser.add_argument("--model", default="smollm2", help="an alias or a .gguf file (default: %(default)s)")
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
    return args


def main(argv: list[str] | None = None) -> int:
    from phloem.runtime.weights.resolve import resolve_model

    args = parsed(argv)
    begin_s = time.perf_counter()
    path = resolve_model(args.model)
    peers = Peers(args.llama_server, args.openvino_python, args.transformers_python)
    made = {name: make_system(name, args.model, path, args.threads, peers) for name in args.systems}
    about = header() | {"model": args.model, "repeats": args.repeats, "quick": args.quick}
    print(*(f"{key}: {value}" for key, value in about.items()), sep="\n")
    if missing := [name for name, system in made.items() if system is None]:
        print(f"not installed: {', '.join(missing)}")
    workloads = [WORKLOADS[name] for name in args.names]
    if args.ablations:
        return ablate(args, about, begin_s)
    with ExitStack() as stack:
        systems: list[System] = []
        for system in made.values():
            if system is not None:
                stack.callback(system.stop)
                system.start()
                systems.append(system)
        found = measure(
            systems,
            workloads,
            repeats=args.repeats,
            alone=num_alone(args),
            count=counts(args),
            say=say,
        )
        versions = {system.name: system.version for system in systems}
        if args.save:
            keep(OUT, args.model, about | {"versions": versions}, as_json(found), {})
        equal = {}
        by_name = {system.name: system for system in systems}
        if PROGRAM in by_name and HTTP in by_name:
            for workload in workloads:
                num = workload.quick if args.quick else -(-workload.count // 2)
                equal[workload.name] = same_answers(by_name[PROGRAM], by_name[HTTP], workload, num)
    print("", *table(found, list(versions)), "", sep="\n")
    print(*(judged(found, bar) for bar in BARS), sep="\n")
    if equal:
        same, asked = (sum(column) for column in zip(*equal.values(), strict=True))
        print(f"greedy answers by program that equal those by HTTP: {same} of {asked}")
    for fault in count_faults(found, WORKLOADS):
        print(f"other work: {fault}")
    print(f"{time.perf_counter() - begin_s:.0f} s in all")
    if args.save:
        keep(OUT, args.model, about | {"versions": versions}, as_json(found), equal)
        print("written:", OUT, *page.write())
    return 0


def counts(args: argparse.Namespace) -> Callable[[Workload], int]:
    return lambda workload: workload.quick if args.quick else workload.count


def num_alone(args: argparse.Namespace) -> int:
    """Programs of a repeat that run one after the other, for the latency."""
    return 1 if args.quick else 2


def say(text: str) -> None:
    print(text, flush=True)


def ablate(args: argparse.Namespace, about: dict[str, Any], begin_s: float) -> int:
    workloads = [WORKLOADS[name] for name in args.names]
    found = ablations.measure_ablations(
        args.model,
        workloads,
        threads=args.threads,
        repeats=args.repeats,
        count=counts(args),
        tight_count=lambda workload: -(-workload.count // 2) if args.quick else workload.count,
        say=say,
    )
    print("", *ablations.table(found), "", f"{time.perf_counter() - begin_s:.0f} s in all", sep="\n")
    if args.save:
        keep(OUT, args.model, about, as_json(found), {}, part="ablations")
        print("written:", OUT, *page.write())
    return 0


if __name__ == "__main__":
    sys.exit(main())
