"""Decoding with drafts and without: copying, JSON, code edits, chat, and sixteen chats at once, in one engine.

    python -m benchmarks.speculation                                                     # SmolLM2, about a minute
    python -m benchmarks.speculation --model qwen2.5-coder-1.5b --repeats 1 --max-tokens 96            # about 2
    python -m benchmarks.speculation --model qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b \
        --repeats 1 --max-tokens 96 --only code chat                                                   # about 1

Greedy. Each answer starts with an empty cache and drafters that have seen none of its text. It runs once without drafts
and once with them, in alternating order. A shorter run before warms up kernels and learns the costs of steps. Tokens
per second count decoding alone; for the load of sixteen they count the whole time. With a draft model, a second part
forces its drafts and computes the gain of longer chains from the acceptance rate and the costs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import MAX_DRAFT, EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.speculative import ModelDrafter, Speculation, StepCosts

from . import RESULTS, header, save
from .prose import DOCUMENT

COST_SIZES = (1, 2, 4, 8, 16, 32)  # tokens of the steps of `--step-costs`

CODE = '''def total_price(items, tax_rate):
    """The price of all items with tax."""
    total = 0
    for item in items:
        price = item["price"] * item["quantity"]
        if item.get("discount"):
            price = price * (1 - item["discount"])
        total = total + price
    total = total + total * tax_rate
    return round(total, 2)


def print_bill(items, tax_rate):
    for item in items:
        print(item["name"], item["price"], item["quantity"])
    print("Total:", total_price(items, tax_rate))
'''
RECORD = json.dumps(
    {
        "order": 48213,
        "customer": {"name": "Ada Byron", "city": "London", "email": "ada@example.org"},
        "items": [
            {"name": "notebook", "price": 4.5, "quantity": 3},
            {"name": "fountain pen", "price": 22.0, "quantity": 1},
            {"name": "ink, blue", "price": 7.25, "quantity": 2},
        ],
        "status": "open",
    },
    indent=2,
)
WORKLOADS: dict[str, list[str]] = {
    "quote": ["Repeat the following text exactly, word for word:\n\n" + DOCUMENT[:700]],
    "json": [
        f"Here is an order:\n\n```json\n{RECORD}\n```\n\nWrite the same JSON again with the status set to closed."
    ],
    "code": [
        f"A Python file:\n\n```python\n{CODE}```\n\nRename the variable total to amount and write the whole file.",
        f"```python\n{CODE}```\n\nAdd a parameter currency to print_bill and write the whole file again.",
    ],
    "chat": [
        "Tell me a story about a ship that is lost at sea.",
        "Explain why the sky is blue and what sunsets have to do with it.",
        "What should I think about before I adopt a dog?",
    ],
}
LOAD = [f"Write a short paragraph about {subject}." for subject in (
    "tea", "rivers", "the moon", "chess", "bees", "old maps", "bread", "trains",
    "winter", "violins", "deserts", "lighthouses", "glass", "honesty", "gardens", "the sea",
)]  # fmt: skip


@dataclass(slots=True)
class Figures:
    """One workload. ``off`` and ``on``: tokens per second of each repeat, without and with drafts."""

    workload: str
    off: list[float] = field(default_factory=list)
    on: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    forwards: int = 0
    same: bool = True

    @property
    def ratio(self) -> float:
        """The median over repeats of on / off; the two of a repeat ran one after the other."""
        return statistics.median(on / off for on, off in zip(self.on, self.off, strict=True))


@dataclass(slots=True)
class Answer:
    tokens: tuple[int, ...]
    decode_s: float
    drafted: int
    accepted: int
    forwards: int


def ask(engine: EngineCore, questions: list[str], *, speculative: bool, max_tokens: int) -> tuple[list[Answer], float]:
    """The answers to questions asked at once, and the seconds until the last."""
    assert engine.template is not None
    engine.step([(b"bench", m.Query(0, "flush_cache"))])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculative=speculative)
    inbox: list[tuple[bytes, m.ClientMessage]] = []
    for i, question in enumerate(questions):
        parts = engine.template.render([{"role": "user", "content": question}])
        ops: list[o.AnyOp] = []
        for part in parts:
            at = len(ops)
            ops.append(o.Text(op=at, seq=0, text=part) if isinstance(part, str) else o.Special(op=at, seq=0, ids=part))
        ops += [o.Gen(op=len(ops), seq=0, params=params), o.Close(op=len(ops) + 1, seq=0)]
        inbox.append((b"bench", m.Submit(str(i), ops)))
    metas: dict[str, m.GenMeta] = {}
    stats: dict[str, m.ProgramStats] = {}
    start_s = time.perf_counter()
    while len(stats) < len(questions):
        for _, message in engine.step(inbox):
            if isinstance(message, m.Done) and isinstance(message.meta, m.GenMeta):
                metas[message.program] = message.meta
            elif isinstance(message, m.Closed):
                stats[message.program] = message.stats
            elif isinstance(message, m.Failed | m.Rejected):
                raise RuntimeError(message)
        inbox = []
    elapsed_s = time.perf_counter() - start_s
    answers = []
    for i in range(len(questions)):
        candidate = metas[str(i)].candidates[0]
        answers.append(
            Answer(
                candidate.token_ids,
                metas[str(i)].decode_s,
                candidate.drafted_tokens,
                candidate.accepted_tokens,
                stats[str(i)].forwards,
            )
        )
    return answers, elapsed_s


def measure(engine: EngineCore, workload: str, *, repeats: int, max_tokens: int) -> Figures:
    figures = Figures(workload)
    groups = [LOAD] if workload == "load of 16" else [[question] for question in WORKLOADS[workload]]
    for group in groups:  # prepares kernels, and learns what steps cost
        for speculative in (True, False):
            ask(engine, group, speculative=speculative, max_tokens=max_tokens // 3)
    for repeat in range(repeats):
        tokens = {False: 0, True: 0}
        seconds = {False: 0.0, True: 0.0}
        for i, group in enumerate(groups):
            said: dict[bool, list[Answer]] = {}
            for speculative in (False, True) if (repeat + i) % 2 else (True, False):
                found, elapsed_s = ask(engine, group, speculative=speculative, max_tokens=max_tokens)
                said[speculative] = found
                tokens[speculative] += sum(len(answer.tokens) for answer in found)
                seconds[speculative] += elapsed_s if len(group) > 1 else found[0].decode_s
            figures.drafted += sum(answer.drafted for answer in said[True])
            figures.accepted += sum(answer.accepted for answer in said[True])
            figures.forwards += sum(answer.forwards for answer in said[True])
            figures.same &= [a.tokens for a in said[True]] == [a.tokens for a in said[False]]
        figures.tokens += tokens[True]
        figures.off.append(tokens[False] / seconds[False])
        figures.on.append(tokens[True] / seconds[True])
    return figures


def best_copying_s(prompt: Sequence[int], answer: Sequence[int], step_s: Callable[[int], float]) -> float:
    """Seconds to decode ``answer`` if every draft that copies were known to be right: no lookup is faster.

    A draft may follow any earlier occurrence of the last token, in the prompt or in the answer so far, and ends before
    its first wrong token. ``step_s(n)``: seconds of a step of n tokens.
    """
    text, first = [*prompt, *answer], len(prompt)
    places: dict[int, list[int]] = {}
    longest = []
    for at, token in enumerate(text[:-1]):
        if at >= first - 1:
            longest.append(max((_num_equal(text, other + 1, at + 1) for other in places.get(token, ())), default=0))
        places.setdefault(token, []).append(at)
    left_s = [0.0] * (len(answer) + 1)  # from each token of the answer on
    for i in range(len(answer) - 1, -1, -1):
        most = min(longest[i], len(answer) - i - 1, MAX_DRAFT)
        left_s[i] = min(step_s(1 + n) + left_s[i + n + 1] for n in range(most + 1))
    return left_s[0]


def _num_equal(text: Sequence[int], earlier: int, later: int) -> int:
    """How many tokens from ``earlier`` on equal those from ``later`` on."""
    num, most = 0, min(later - earlier, len(text) - later)
    while num < most and text[earlier + num] == text[later + num]:
        num += 1
    return num


def copying_limit(engine: EngineCore, workload: str, step_s: Callable[[int], float], *, max_tokens: int) -> float:
    """The speed of ``best_copying_s`` relative to one token a step."""
    assert engine.template is not None
    plain_s = best_s = 0.0
    for question in WORKLOADS[workload]:
        prompt: list[int] = []
        for part in engine.template.render([{"role": "user", "content": question}]):
            prompt += engine.tokenizer.encode(part, at_start=not prompt) if isinstance(part, str) else part
        (answer,), _ = ask(engine, [question], speculative=True, max_tokens=max_tokens)
        plain_s += len(answer.tokens) * step_s(1)
        best_s += best_copying_s(prompt, answer.tokens, step_s)
    return plain_s / best_s


@dataclass(slots=True)
class Arithmetic:
    """The speed of chains of k drafts from a draft model, relative to decoding without drafts.

        gains[k] = (1 + share + .. + share^k) / (steps[k] + k * cost)

    ``share``: the share of accepted drafts. ``cost``: the time of one draft, and ``steps[k]``: the time of a step that
    verifies k drafts, both relative to a step without drafts.
    """

    workload: str
    share: float
    cost: float
    steps: list[float]
    gains: list[float]


def chain_gains(engine: EngineCore, drafter: ModelDrafter, workload: str, *, max_tokens: int) -> Arithmetic:
    """Verify every draft on a workload's questions, and compute the gain of chains of 0 to 6 drafts."""
    learnt = engine.loop.speculation
    assert learnt is not None
    right, judged = drafter.num_right, drafter.num_judged
    engine.loop.speculation = Speculation([drafter], max_draft=4, costs=_Forced(slope=0.0))
    for question in WORKLOADS[workload]:
        ask(engine, [question], speculative=True, max_tokens=max_tokens)
    engine.loop.speculation = learnt
    share = (drafter.num_right - right) / max(drafter.num_judged - judged, 1)
    estimate = learnt.costs.estimate
    cost = float(drafter.token_s / estimate[1])
    steps = [float(estimate[1 + k] / estimate[1]) for k in range(7)]
    gains = [sum(share**i for i in range(k + 1)) / (steps[k] + k * cost) for k in range(7)]
    return Arithmetic(workload, share, cost, steps, gains)


class _Forced(StepCosts):
    """Costs under which every draft pays: a decode step takes an hour, and a draft's row takes no time."""

    def __init__(self, *, slope: float) -> None:
        super().__init__(slope=slope)
        self.estimate[:] = 3600.0

    def observe(self, num_tokens: int, seconds: float) -> None: ...


def table(figures: list[Figures]) -> str:
    lines = [
        "| workload | off, tokens/s | on, tokens/s | on / off | drafted | accepted | tokens a forward | same text |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for f in figures:
        share = f"{f.accepted / f.drafted:.0%}" if f.drafted else "-"
        lines.append(
            f"| {f.workload} | {statistics.median(f.off):.0f} | {statistics.median(f.on):.0f} | {f.ratio:.2f} "
            f"| {f.drafted / f.tokens:.2f} a token | {share} | {f.tokens / f.forwards:.1f} "
            f"| {'yes' if f.same else 'no'} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model", default="")
    parser.add_argument("--speculative", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--only", nargs="*", default=[*WORKLOADS, "load of 16"])
    parser.add_argument(
        "--step-costs",
        type=lambda text: [float(part) for part in text.split(",")],
        help="what steps of 2, 4, 8, 16 and 32 tokens cost, relative to one token, for the limit of copying; without "
        "it what the engine learnt",
    )
    args = parser.parse_args(argv)
    if args.step_costs and len(args.step_costs) != len(COST_SIZES) - 1:
        parser.error(f"--step-costs: {len(args.step_costs)} costs; give those of 2, 4, 8, 16 and 32 tokens")
    options: dict[str, Any] = {"draft_model": args.draft_model} if args.draft_model else {}
    engine = EngineCore(EngineConfig(model=args.model, num_slots=8192, speculative=args.speculative, **options))
    found = header()
    print(f"{found['machine']}\ncommit {found['commit']}, {found['command']}\n")
    figures = []
    for name in args.only:
        figures.append(measure(engine, name, repeats=args.repeats, max_tokens=args.max_tokens))
        print(table(figures[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(figures))
    metrics = engine.metrics()
    for name in ("drafted_tokens", "accepted_tokens", "draft_saved_seconds"):
        print(f"{name}: {metrics[name]}")
    arithmetic: list[Arithmetic] = []
    limits: dict[str, float] = {}
    if engine.loop.speculation is not None:
        estimate = engine.loop.speculation.costs.estimate
        shown = ", ".join(f"{n}: {estimate[n] / estimate[1]:.2f}" for n in (2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32))
        print(f"cost of a step by tokens, against one ({estimate[1] * 1e3:.1f} ms): {shown}")
        known = dict(zip(COST_SIZES, [1.0, *args.step_costs], strict=False)) if args.step_costs else None

        def step_s(n: int) -> float:
            return float(estimate[n] if known is None else np.interp(n, list(known), list(known.values())))

        for name in args.only:
            if name in WORKLOADS:
                limits[name] = copying_limit(engine, name, step_s, max_tokens=args.max_tokens)
                print(f"{name}: at most {limits[name]:.2f} by copying, if every draft were right")
        for drafter in engine.loop.speculation.drafters:
            if isinstance(drafter, ModelDrafter):
                names = [name for name in args.only if name in WORKLOADS]
                arithmetic += [chain_gains(engine, drafter, name, max_tokens=args.max_tokens // 2) for name in names]
    for a in arithmetic:
        gains = ", ".join(f"{k}: {gain:.2f}" for k, gain in enumerate(a.gains))
        print(
            f"{a.workload}: {a.share:.0%} of the model's drafts are accepted, each takes {a.cost:.2f} of a step; "
            f"speed by length of chain: {gains}"
        )
    kind = args.draft_model.split(":")[0].replace("/", "_")
    name = f"speculation_{args.model.replace('/', '_')}{'_with_' + kind if kind else ''}.json"
    kept = {
        **found,
        "figures": [asdict(f) for f in figures],
        "copying_limits": limits,
        "arithmetic": [asdict(a) for a in arithmetic],
    }
    save(RESULTS / name, kept)
    engine.close()


if __name__ == "__main__":
    main()
