"""The step time that ``phloem plan`` predicts for this CPU, beside the engine's: milliseconds of a decode step.

    python -m benchmarks.plan [--model smollm2] [--measure-again] [--out FILE]

Prints both and their ratio for several batches and contexts. Exit status 1: a prediction is off by more than 20%.
"""

import argparse
import sys
from pathlib import Path

from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.planning import ModelShape, step_time
from phloem.runtime.planning.measured import cpu_hardware
from phloem.runtime.profiling import Load, run_load
from phloem.runtime.weights import open_weights
from phloem.runtime.weights.home import default_home

from . import print_header, save

CASES = ((1, 100), (1, 2000), (4, 500), (8, 100), (16, 100), (16, 1000), (32, 300))  # rows x tokens of prompt
NEW_TOKENS = 24
BOUND = 0.2
PARTS = ("linear", "attention", "small_ops", "head", "host")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", type=int, default=len(CASES), help="number of cases to run")
    parser.add_argument("--measure-again", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    report = print_header()
    hardware = cpu_hardware(default_home(), again=args.measure_again)
    engine = EngineCore(EngineConfig(model=args.model, speculative="off"))
    shape = ModelShape.of_file(args.model, open_weights(engine.model_path))
    run_load(engine, Load(rows=2, new_tokens=8))
    rows_off = 0
    report["cases"] = []
    parts = "".join(f"{name:>11}" for name in PARTS)
    print(f"{'rows':>6}{'context':>9}{'measured ms':>13}{'best':>9}{'predicted ms':>14}{'ratio':>8}{parts}")
    for rows, prompt in CASES[: args.cases]:
        # All rows decode together from the end of the last prompt until the first answer ends.
        new_tokens = NEW_TOKENS + rows * prompt // (engine.config.max_step_tokens // 2)
        load = Load(rows=rows, prompt_tokens=prompt, new_tokens=new_tokens)
        times = [ms for _ in range(2) for ms in run_load(engine, load).decode_ms]
        measured, best = sorted(times)[len(times) // 2], min(times)
        predicted = step_time(shape, hardware, rows=rows, context=prompt + new_tokens / 2)
        ratio = predicted.total * 1e3 / measured
        rows_off += abs(ratio - 1) > BOUND
        report["cases"].append(
            {"rows": rows, "context": prompt, "measured": measured, "best": best, "predicted": predicted.total * 1e3}
        )
        parts = "".join(f"{getattr(predicted, name) * 1e3:>11.2f}" for name in PARTS)
        print(
            f"{rows:>6}{prompt:>9}{measured:>13.2f}{best:>9.2f}{predicted.total * 1e3:>14.2f}{ratio:>8.2f}{parts}",
            flush=True,
        )
    engine.close()
    print(f"{rows_off} of {args.cases} cases are off by more than {BOUND:.0%}")
    if args.out:
        save(args.out, report)
    return 1 if rows_off else 0


if __name__ == "__main__":
    sys.exit(main())
