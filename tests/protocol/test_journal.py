"""A program whose engine is replaced at any moment, any number of times, gives the results of an undisturbed run."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import InternalError
from phloem.protocol.journal import Journal
from phloem.protocol.ops import AnyOp
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.cluster.programs import RandomProgram

CLIENT = b"test"
MANY = 1 << 30


@dataclass
class Heard:
    """The events that a program's caller received."""

    ends: dict[int, m.Done | m.Failed] = field(default_factory=dict)
    streams: dict[tuple[int, int], list[m.Delta]] = field(default_factory=dict)
    num_accepted: int = 0
    closed: m.Closed | None = None

    def take(self, message: m.RuntimeMessage) -> None:
        assert self.closed is None, message
        match message:
            case m.Done() | m.Failed():
                assert message.op not in self.ends, "two ends"
                self.ends[message.op] = message
            case m.Delta():
                assert message.op not in self.ends, "a delta after the end"
                self.streams.setdefault((message.op, message.index), []).append(message)
            case m.Accepted():
                self.num_accepted += 1
            case m.Closed():
                self.closed = message
            case _:
                raise AssertionError(message)

    def shown(self) -> dict[object, object]:
        """The results that must not depend on the engine that ran the program."""
        found: dict[object, object] = {"accepted": self.num_accepted}
        for op, end in self.ends.items():
            if isinstance(end, m.Failed):
                found[op] = (end.error.kind, end.error.message)
                continue
            value = round(end.value, 3) if isinstance(end.value, float) else end.value
            found[op] = value
            if isinstance(end.meta, m.GenMeta):
                found[op] = (
                    value,
                    [(c.token_ids, c.finish_reason, c.matched_stop, c.completion_tokens) for c in end.meta.candidates],
                    [[p.token_id for p in c.logprobs] for c in end.meta.candidates],
                )
        for (op, index), deltas in self.streams.items():
            text = "".join(delta.text for delta in deltas)
            logprobs = [p.token_id for delta in deltas for p in delta.logprobs]
            found["stream", op, index] = (text, [i for delta in deltas for i in delta.token_ids], logprobs)
        if self.closed is not None:
            found["closed"] = self.closed.stats.submits
        return found


class Rig:
    """A program on one of two engines, sent part by part. ``lose`` replaces the engine by the other one."""

    def __init__(self, engines: list[EngineCore], submits: list[m.Submit], *, max_bytes: int = MANY) -> None:
        self.engines = engines
        self.journal = Journal("p", max_bytes=max_bytes)
        self.heard = Heard()
        self.num_losses = 0
        self._submits = deque(submits)
        self._inbox: list[tuple[bytes, m.ClientMessage]] = []
        self._unsent: deque[m.Submit | m.Cancel] = deque()
        self._is_unanswered = False

    @property
    def engine(self) -> EngineCore:
        return self.engines[0]

    def send_part(self) -> None:
        if self._submits:
            self.send(self._submits.popleft())

    def send(self, message: m.Submit | m.Cancel) -> None:
        self.journal.sent(message)
        self._unsent.append(message)

    def step(self, *, num_delivered: int | None = None) -> None:
        """One step of the engine, of whose messages the caller gets the first ``num_delivered``, or all."""
        while self._unsent and not self._is_unanswered:
            self._is_unanswered = isinstance(self._unsent[0], m.Submit)
            self._inbox.append((CLIENT, self._unsent.popleft()))
        inbox, self._inbox = self._inbox, []
        for _, message in self.engine.step(inbox)[:num_delivered]:
            self._is_unanswered = self._is_unanswered and not isinstance(message, m.Accepted)
            found = self.journal.came(message)
            if found is not None:
                self.heard.take(found)

    def lose(self) -> None:
        self.num_losses += 1
        self.engine.drop_client(CLIENT)
        self.engine.step([])
        assert not self.engine.has_work
        self.engine.check()
        self.engines.reverse()
        if self.heard.closed is None:
            self._inbox.clear()
            self._unsent = deque(self.journal.replay(elapsed_s=0.0))
            self._is_unanswered = False

    def run(self, before_step: Callable[[int], int | None] = lambda step: None) -> dict[object, object]:
        """Until the program is closed; ``before_step`` may act and cut a step's messages."""
        self.send_part()
        for step in range(5000):
            cut = before_step(step)
            self.step(num_delivered=cut)
            if cut is not None:
                self.lose()
            if self.heard.closed is not None:
                return self.heard.shown()
            if step % 7 == 3 or not self.engine.has_work:
                self.send_part()
        raise AssertionError("the program does not end")


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path) -> Iterator[list[EngineCore]]:
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=4096, num_threads=1)
    found = [EngineCore(config), EngineCore(config)]
    yield found
    for engine in found:
        engine.close()


def submits_of(seed: int) -> list[m.Submit]:
    settings = m.ProgramSettings(name="random")
    parts = RandomProgram(random.Random(seed)).submits
    return [m.Submit("p", part, settings if i == 0 else None) for i, part in enumerate(parts)]


@pytest.mark.parametrize("seed", range(16))
def test_a_program_survives_any_losses(engines: list[EngineCore], seed: int) -> None:
    whole = Rig(engines, submits_of(seed)).run()
    rng = random.Random(1000 + seed)
    rate = rng.choice([0.03, 0.1, 0.3])
    rig = Rig(engines, submits_of(seed))

    def lose(step: int) -> int | None:
        return rng.randrange(6) if rng.random() < rate and rig.num_losses < 12 else None

    assert rig.run(lose) == whole
    assert rig.journal.is_whole


@pytest.mark.parametrize("seed", range(10))
def test_cancelled_ops_stay_cancelled_and_the_others_are_right(engines: list[EngineCore], seed: int) -> None:
    submits = submits_of(seed)
    ops = {op.op: op for submit in submits for op in submit.ops}
    whole = Rig(engines, submits).run()
    rng = random.Random(2000 + seed)
    rig = Rig(engines, submits)

    def act(step: int) -> int | None:
        if rng.random() < 0.1:
            op = rng.choice(list(ops.values()))
            rig.send(m.Cancel("p", op=op.op) if rng.random() < 0.7 else m.Cancel("p", seq=op.seq))
        return rng.randrange(6) if rng.random() < 0.15 and rig.num_losses < 10 else None

    found = rig.run(act)
    assert rig.heard.ends.keys() == ops.keys()
    failed: set[int] = set()  # sequences with an op that failed
    for op in sorted(ops):
        end, seq = rig.heard.ends[op], ops[op].seq
        if isinstance(end, m.Failed):
            assert end.error.kind in ("Cancelled", "DependencyFailed"), end
            failed.add(seq)
        elif not isinstance(ops[op], o.Close):
            assert seq not in failed and found[op] == whole[op]
    for (op, index), deltas in rig.heard.streams.items():
        text = "".join(delta.text for delta in deltas)
        assert whole["stream", op, index][0].startswith(text)  # type: ignore[index]


def stream_of(engines: list[EngineCore], max_bytes: int = MANY) -> Rig:
    """A program that streams, with some of its text delivered; without drafts, so a step makes one token."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, speculative=False)
    ops: list[AnyOp] = [o.Text(op=0, seq=0, text="x" * 40), o.Gen(op=1, seq=0, params=params, stream=True)]
    rig = Rig(engines, [m.Submit("p", [*ops, o.Close(op=2, seq=0)])], max_bytes=max_bytes)
    rig.send_part()
    while len(rig.heard.streams.get((1, 0), ())) < 5:
        rig.step()
    return rig


def test_a_repetition_that_differs_is_a_fault_that_names_the_program(engines: list[EngineCore]) -> None:
    rig = stream_of(engines)
    rig.lose()
    rig.journal.came(m.Accepted("p"))
    with pytest.raises(InternalError, match="program 'p' was carried on by another engine, which wrote another text"):
        rig.journal.came(m.Delta("p", 1, "something else", (1, 2, 3)))
    rig = stream_of(engines)
    rig.lose()
    rig.journal.came(m.Accepted("p"))
    with pytest.raises(InternalError, match="in op 1: its end"):
        rig.journal.came(m.Done("p", 1, ["too short"]))
    rig.engine.drop_client(CLIENT)


def test_progress_counts_what_is_new(engines: list[EngineCore]) -> None:
    rig = stream_of(engines)
    progress = rig.journal.progress
    assert progress >= 5
    rig.lose()
    rig.step()  # the submit is accepted, and the tokens are repeated
    assert rig.journal.progress in (progress, progress + 1)
    rig.step()
    assert rig.journal.progress > progress
    rig.engine.drop_client(CLIENT)


def test_a_journal_that_grows_too_large_is_given_up_and_the_program_runs_on(engines: list[EngineCore]) -> None:
    whole = stream_of(engines).run()
    rig = stream_of(engines, max_bytes=800)
    rig.lose()
    assert rig.run() == whole  # nothing is streamed twice, although it became too large on the way
    assert not rig.journal.is_whole and rig.journal.num_bytes == 0


def test_bytes_are_given_back_when_ops_end(engines: list[EngineCore]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, return_logprob=True, top_logprobs_num=5)
    gens = [o.Gen(op=i, seq=0, params=params, stream=True, n=2) for i in range(3)]
    rig = Rig(engines, [m.Submit("p", [*gens, o.Close(op=3, seq=0)])])
    most = 0

    def watch(step: int) -> None:
        nonlocal most
        most = max(most, rig.journal.num_bytes)

    rig.run(watch)
    assert most > 40 * 2 * 5 * 100 and rig.journal.num_bytes < 4_000


def test_a_long_program_is_replayed_in_parts_that_the_limits_allow() -> None:
    limits = m.Limits(max_ops_per_submit=10, max_submit_bytes=4_000)
    journal = Journal("p", max_bytes=MANY, limits=limits)
    for part in range(5):
        ops: list[AnyOp] = [o.Text(op=part * 6 + i, seq=0, text="x" * (500 if part == 4 else 1)) for i in range(6)]
        journal.sent(m.Submit("p", ops, m.ProgramSettings(name="long", deadline_s=9.0) if not part else None))
        if part < 4:
            journal.came(m.Accepted("p"))
    again = journal.replay(elapsed_s=2.0)
    assert [len(submit.ops) for submit in again if isinstance(submit, m.Submit)] == [10, 10, 4, 6]
    first = again[0]
    assert isinstance(first, m.Submit) and first.settings == m.ProgramSettings(name="long", deadline_s=7.0)
    answers = [journal.came(m.Accepted("p")) for _ in range(4)]
    assert answers == [None, None, None, m.Accepted("p")]
