"""A client without sockets: submits ops to an engine's ``step`` and gathers what comes back."""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.engine import EngineCore

CLIENT = b"test"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@dataclass
class Outcome:
    """The messages that a program got. ``ends`` counts the final messages of each op, of which there must be one."""

    done: dict[int, m.Done] = field(default_factory=dict)
    failed: dict[int, m.Failed] = field(default_factory=dict)
    deltas: list[m.Delta] = field(default_factory=list)
    rejected: m.Rejected | None = None
    closed: m.Closed | None = None
    ends: dict[int, int] = field(default_factory=dict)

    def take(self, message: m.RuntimeMessage) -> None:
        match message:
            case m.Done():
                self.done[message.op] = message
                self.ends[message.op] = self.ends.get(message.op, 0) + 1
            case m.Failed():
                self.failed[message.op] = message
                self.ends[message.op] = self.ends.get(message.op, 0) + 1
            case m.Delta():
                assert message.op not in self.ends, "a delta after the end"
                self.deltas.append(message)
            case m.Rejected():
                self.rejected = message
            case m.Closed():
                assert self.closed is None
                self.closed = message

    def value(self, op: int) -> object:
        if op in self.failed:
            raise AssertionError(self.failed[op])
        return self.done[op].value


class Driver:
    """Drives one engine. ``check``: verify the cache's slots after every step.

    ``mask_budget_s``: how long a step waits for masks; for so long that no step depends on the machine's speed.
    """

    def __init__(self, engine: EngineCore, *, check: bool = True, mask_budget_s: float = 600.0) -> None:
        self.engine = engine
        engine.loop.masks.budget_s = mask_budget_s
        self.check = check
        self.outcomes: dict[str, Outcome] = {}
        self.answers: list[m.Answer] = []
        self._inbox: list[tuple[bytes, m.ClientMessage]] = []
        self._num_programs = 0

    def submit(self, ops: list[o.AnyOp], *, program: str = "", settings: m.ProgramSettings | None = None) -> Outcome:
        if not program:
            self._num_programs += 1
            program = f"p{self._num_programs}"
        self._inbox.append((CLIENT, m.Submit(program, ops, settings)))
        return self.outcomes.setdefault(program, Outcome())

    def say(self, message: m.ClientMessage) -> None:
        self._inbox.append((CLIENT, message))

    def step(self) -> None:
        inbox, self._inbox = self._inbox, []
        for client, message in self.exchange(inbox):
            assert client == CLIENT
            if isinstance(message, m.Answer):
                self.answers.append(message)
            elif hasattr(message, "program"):
                self.outcomes[message.program].take(message)
        if self.check:
            self.engine.check()

    def exchange(self, inbox: list[tuple[bytes, m.ClientMessage]]) -> list[tuple[bytes, m.RuntimeMessage]]:
        """One step of the engine; a driver with other clients adds their messages, and takes out the answers."""
        return self.engine.step(inbox)

    def run(self, ops: list[o.AnyOp] | None = None, *, limit: int = 20_000, **options: object) -> Outcome:
        """Submit ``ops`` and step until the engine has no work."""
        outcome = self.submit(ops, **options) if ops is not None else Outcome()
        for _ in range(limit):
            self.step()
            if not self.engine.has_work and not self._inbox:
                return outcome
        raise AssertionError(f"not over after {limit} steps")


def generate(
    driver: Driver, prompt: str, params: SamplingParams = GREEDY, **options: Any
) -> tuple[list[str], m.GenMeta]:
    """The value and meta of one Gen on ``prompt``."""
    outcome = driver.run([o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=params, **options)])
    return outcome.value(1), outcome.done[1].meta


def prompts(count: int, *, seed: int = 0, longest: int = 300) -> list[str]:
    """Prompts of random words, of at most about ``longest`` letters."""
    rng = random.Random(seed)
    words = ["sap", "leaf", "root", "ring", "phloem", "xylem", "Grüße", "木", "42", "and", "the"]
    return [" ".join(rng.choice(words) for _ in range(rng.randrange(1, longest // 5))) for _ in range(count)]


def with_more(gen: o.Gen, *, prompt: str, text: str, after: SamplingParams) -> list[o.AnyOp]:
    """``prompt``; ``gen`` as op 1, streamed; ``text``; a generation as op 3 with the parameters ``after``; a close."""
    return [
        o.Text(op=0, seq=0, text=prompt),
        msgspec.structs.replace(gen, stream=True),
        o.Text(op=2, seq=0, text=text),
        o.Gen(op=3, seq=0, params=after),
        o.Close(op=4, seq=0),
    ]
