"""Programs of random shape and length, cancelled at random points, in a cache of a tenth of the slots they need.

``PHLOEM_SOAK_REQUESTS`` sets their number: 320 by default, 100,000 with ``make soak``, which prints each round.
"""

import gc
import logging
import os
import random
import re
import time
from dataclasses import dataclass, field

import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import CLIENT, Driver

NUM_REQUESTS = int(os.environ.get("PHLOEM_SOAK_REQUESTS", "320"))
NUM_ROUNDS = max(8, NUM_REQUESTS // 1250)  # so that a round's records stay small
NUM_SLOTS = 700
AT_ONCE = 45  # of about 170 tokens each: ten times the slots
STEPS_PER_CHECK = 20

log = logging.getLogger(__name__)


def random_text(rng: random.Random) -> str:
    """One of 200 texts: the tokenizer caches the last 10,000 pieces of text, which would look like a leak."""
    rng = random.Random(rng.randrange(200))
    stem = "You are one of three helpful voices. " * rng.randrange(3)
    return stem + "".join(rng.choice("abc ") for _ in range(rng.randrange(1, 160)))


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        max_tokens=rng.randrange(1, 16) if rng.random() < 0.9 else rng.randrange(60, 120),
        ignore_eos=rng.random() < 0.7,
        stop=("b",) if rng.random() < 0.2 else (),
    )


def random_ops(rng: random.Random) -> list[o.AnyOp]:
    """One generation, several turns, a fork with a join, or a select; always closed, always of known length."""
    ops: list[o.AnyOp] = []

    def text(seq: int) -> None:
        ops.append(o.Text(op=len(ops), seq=seq, text=random_text(rng)))

    def gen(seq: int) -> None:
        ops.append(o.Gen(op=len(ops), seq=seq, params=random_params(rng), n=rng.choice([1, 1, 1, 2])))

    text(0)
    match rng.randrange(4):
        case 0:
            gen(0)
        case 1:
            for _ in range(rng.randrange(2, 4)):
                gen(0)
                text(0)
        case 2:
            children = tuple(range(1, 1 + rng.randrange(2, 4)))
            ops.append(o.Fork(op=len(ops), seq=0, children=children))
            for child in children:
                text(child)
                gen(child)
            ops.append(o.Join(op=len(ops), seq=0, children=children))
            gen(0)
            for child in children:
                ops.append(o.Close(op=len(ops), seq=child))
        case 3:
            ops.append(o.Select(op=len(ops), seq=0, choices=("yes", "no", "perhaps so")))
            gen(0)
    ops.append(o.Close(op=len(ops), seq=0))
    return ops


def random_cancel(rng: random.Random, name: str, ops: list[o.AnyOp]) -> m.Cancel:
    """Cancels the program, a sequence, an op that may have ended, or an op that does not exist."""
    op = rng.choice(ops)
    return rng.choice([m.Cancel(name), m.Cancel(name, seq=op.seq), m.Cancel(name, op=op.op), m.Cancel(name, op=99)])


@dataclass
class Record:
    """Memory and objects after each round."""

    num_requests: int = 0
    wrong_ends: list[str] = field(default_factory=list)
    num_cancelled: int = 0
    num_partial: int = 0
    lost_slots: list[int] = field(default_factory=list)
    num_objects: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    need_tokens: list[int] = field(default_factory=list)


def run_round(engine: EngineCore, num_requests: int, *, seed: int, record: Record) -> None:
    """Keep ``AT_ONCE`` programs going until ``num_requests`` have run and closed."""
    rng = random.Random(seed)
    driver = Driver(engine, check=False)
    sent: dict[str, list[o.AnyOp]] = {}
    open_programs: set[str] = set()
    idle_steps = num_steps = need = 0
    while len(sent) < num_requests or open_programs:
        while len(sent) < num_requests and len(open_programs) < AT_ONCE and rng.random() < 0.7:
            name, ops = f"soak {seed} {len(sent)}", random_ops(rng)
            settings = m.ProgramSettings(tenant=rng.choice(["", "other"]), priority=rng.randrange(2))
            driver.submit(ops, program=name, settings=settings)
            sent[name] = ops
            open_programs.add(name)
        if open_programs and rng.random() < 0.05:
            name = rng.choice(sorted(open_programs))
            driver.say(random_cancel(rng, name, sent[name]))
        forwards_before = engine.loop.counters.forward_tokens
        driver.step()
        num_steps += 1
        if num_steps % STEPS_PER_CHECK == 0:
            engine.check()
            need = max(need, sum(len(seq.tokens) for seq in engine.programs.live.values()))
        closed = {name for name in open_programs if driver.outcomes[name].closed}
        open_programs -= closed
        idle_steps = 0 if closed or engine.loop.counters.forward_tokens > forwards_before else idle_steps + 1
        assert idle_steps < 50, "nothing runs and nothing ends"
    engine.check()
    assert not engine.has_work and not engine.programs.live and not engine.programs.by_key
    outcomes = driver.outcomes
    assert not any(outcome.rejected for outcome in outcomes.values())
    record.num_requests += len(sent)
    record.wrong_ends += [name for name, ops in sent.items() if outcomes[name].ends != {op.op: 1 for op in ops}]
    failed = [message for outcome in outcomes.values() for message in outcome.failed.values()]
    assert {message.error.kind for message in failed} <= {"Cancelled", "DependencyFailed", "PromptTooLong"}
    needs = [re.search("needs ([0-9,]+) KV slots", f.error.message) for f in failed if f.error.kind == "PromptTooLong"]
    assert all(int(need[1].replace(",", "")) > NUM_SLOTS for need in needs), "refused, although it would have fitted"
    record.num_cancelled += sum(message.error.kind == "Cancelled" for message in failed)
    record.num_partial += sum(any(message.partial) for message in failed)
    record.lost_slots.append(NUM_SLOTS - engine.cache.num_free - engine.cache.num_evictable)
    record.need_tokens.append(need)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def engine(tiny_model_path):
    config = EngineConfig(
        model=str(tiny_model_path),
        precision="float32",
        num_slots=NUM_SLOTS,
        max_running=32,
        max_step_tokens=256,
        prefill_chunk=64,
        num_threads=1,
        host_cache_bytes=2 << 20,
    )
    engine = EngineCore(config)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def record(engine) -> Record:
    record = Record()
    begun_s = time.monotonic()
    for seed in range(NUM_ROUNDS):
        run_round(engine, NUM_REQUESTS // NUM_ROUNDS, seed=seed, record=record)
        engine.drop_client(CLIENT)
        engine.cache.flush()  # each round's tree has a slightly different number of nodes
        gc.collect()
        record.num_objects.append(len(gc.get_objects()))
        record.resident_bytes.append(resident_bytes())
        log.info(
            "round %d of %d: %s programs in %.0f s, %s preemptions, %d MB, %s objects",
            *(seed + 1, NUM_ROUNDS, f"{record.num_requests:,}", time.monotonic() - begun_s),
            *(f"{engine.scheduler.num_preemptions:,}", record.resident_bytes[-1] >> 20, f"{record.num_objects[-1]:,}"),
        )
    return record


def test_every_op_ends_once(record):
    assert record.num_requests == NUM_REQUESTS // NUM_ROUNDS * NUM_ROUNDS
    assert record.wrong_ends == []


def test_no_slot_is_lost(record):
    assert record.lost_slots == [0] * NUM_ROUNDS


def test_memory_is_flat(record):
    """The first two rounds warm up the allocators; later rounds leave nothing behind."""
    assert max(record.num_objects[2:]) < record.num_objects[1] + 2000
    assert max(record.resident_bytes[2:]) < record.resident_bytes[1] + 8 * 2**20


def test_the_soak_evicted_and_cancelled(engine, record):
    """The other tests mean something only if the cache was short and programs were cancelled."""
    assert max(record.need_tokens) > 10 * NUM_SLOTS, record.need_tokens
    assert record.num_cancelled > record.num_requests // 50 and record.num_partial > record.num_requests // 200
    assert engine.scheduler.num_preemptions > record.num_requests // 200
    assert engine.scheduler.counters.num_swapped_back > 0 and engine.tiers.counters.restored > record.num_requests // 10
    assert engine.cache.counters.evicted_tokens["space"] > 20 * record.num_requests
