"""A client without sockets: submits ops to an engine's ``step`` and gathers what comes back."""

from dataclasses import dataclass, field

from phloem.runtime.engine import Engine
from phloem.runtime.protocol import messages as m
from phloem.runtime.protocol.ops import AnyOp

CLIENT = b"test"


@dataclass
class Outcome:
    """What a program was told. ``ends`` counts the final messages of each op: exactly one each."""

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
    """Drives one engine. ``check`` after every step: no slot may be lost at any time."""

    def __init__(self, engine: Engine, *, check: bool = True) -> None:
        self.engine = engine
        self.check = check
        self.outcomes: dict[str, Outcome] = {}
        self._inbox: list[tuple[bytes, m.ClientMessage]] = []
        self._num_programs = 0

    def submit(self, ops: list[AnyOp], *, program: str = "", settings: m.ProgramSettings | None = None) -> Outcome:
        if not program:
            self._num_programs += 1
            program = f"p{self._num_programs}"
        self._inbox.append((CLIENT, m.Submit(program, ops, settings)))
        return self.outcomes.setdefault(program, Outcome())

    def say(self, message: m.ClientMessage) -> None:
        self._inbox.append((CLIENT, message))

    def step(self) -> None:
        inbox, self._inbox = self._inbox, []
        for client, message in self.engine.step(inbox):
            assert client == CLIENT
            if hasattr(message, "program"):
                self.outcomes[message.program].take(message)
        if self.check:
            self.engine.check()

    def run(self, ops: list[AnyOp] | None = None, *, limit: int = 20_000, **options: object) -> Outcome:
        """Submit ``ops`` and step until nothing is left to do."""
        outcome = self.submit(ops, **options) if ops is not None else Outcome()
        for _ in range(limit):
            self.step()
            if not self.engine.has_work and not self._inbox:
                return outcome
        raise AssertionError(f"not over after {limit} steps")
