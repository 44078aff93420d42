"""What a rule between a small and a large model saves, and what it costs in right answers.

    python -m benchmarks.rules [--small smollm2] [--large qwen2.5-coder-1.5b] [--cases 16] [--rounds 2] [--save]

The facts of a text as JSON, as in ``benchmarks/workloads/json_extraction.py``, one program after the other: by the
small model, by the large one, and by a rule that keeps the small one's answer where each of its values is in the text.
Every round has new texts. ``saved_s``, the runtime's estimate, stands beside the seconds that were really saved.
"""

import argparse
import json
import time
from typing import Any

import phloem

from . import RESULTS, print_header, save
from .workloads.json_extraction import by_schema, check, make
from .workloads.workload import Case

WAYS = ("small", "large", "auto")


def stands_in_text(state: Any) -> bool:
    """Whether each value of the answer is in the text that was asked about. It may still be the wrong one."""
    text = state.messages()[1]["content"]
    values = [str(value) for value in json.loads(state["answer"]).values()]
    return len(set(values)) == len(values) and all(value and value in text for value in values)


def measure(models: phloem.Models, way: str, cases: list[Case]) -> dict[str, Any]:
    answers, num_by_large = [], 0
    began_s = time.perf_counter()
    for case in cases:
        state = by_schema.run(**case.inputs, temperature=0.0, backend=models[way])
        answers.append((state["answer"], case.expected))
        num_by_large += state.stats()["model"] == "large"
    seconds = time.perf_counter() - began_s
    return {
        "seconds": round(seconds, 2),
        "right": sum(check(answer, expected) for answer, expected in answers),
        "by_large": num_by_large,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", default="smollm2")
    parser.add_argument("--large", default="qwen2.5-coder-1.5b")
    parser.add_argument("--cases", type=int, default=16, help="texts of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/rules.json")
    args = parser.parse_args()
    about = print_header(small=args.small, large=args.large, cases=args.cases)
    rule = phloem.ModelRule(
        cheap="small", strong="large", when=phloem.When(check=phloem.AnswerCheck(holds=stands_in_text))
    )
    rounds = []
    with phloem.Runtime(model=args.small) as small, phloem.Runtime(model=args.large) as large:
        models = phloem.Models({"small": small, "large": large}, rules={"auto": rule})
        for way in ("small", "large"):  # grammars and kernels are ready
            measure(models, way, make(99, 1))
        for number in range(args.rounds):
            cases = make(number, args.cases)
            before = models.report()["auto"].saved_s or 0.0
            found: dict[str, Any] = {}
            for way in WAYS:
                for runtime in (small, large):  # each way computes its own prompts
                    runtime.flush_cache()
                found[way] = measure(models, way, cases)
            found["estimated_saving_s"] = round((models.report()["auto"].saved_s or 0.0) - before, 2)
            found["saved_s"] = round(found["large"]["seconds"] - found["auto"]["seconds"], 2)
            rounds.append(found)
            print(found, flush=True)
    if args.save:
        save(RESULTS / "rules.json", about | {"rounds": rounds})


if __name__ == "__main__":
    main()
