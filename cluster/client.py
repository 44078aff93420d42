"""A client of several engines with the face of ``protocol.client.Client``: programs survive the loss of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..protocol.client import Client
from ..protocol.errors import PhloemError
from ..protocol.messages import Submit, Welcome
from ..protocol.ops import AnyOp
from ..protocol.program_call import ProgramCall


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """``max_wait_s``: how long a program may wait for a ready engine before its ops fail (``EngineLost``, say).

    ``max_waiting``: programs that may wait so. ``max_journal_bytes``: of one program; ``max_journals_bytes``: of all.
    """

    max_wait_s: float = 120.0
    max_waiting: int = 10_000
    max_journal_bytes: int = 64 << 20
    max_journals_bytes: int = 1 << 30


class FleetClient:
    """Hands whole programs to engines and keeps their journals. Methods may be called on any thread.

    ``tokenize(ops)``: the token ids of a program's first prompt as the engine makes them, for placement; not called
    while there is one engine. Engines come and go with ``add`` and ``remove`` (the supervisor calls them).
    ``on_lost(engine, error)`` is called once for each engine whose line ends.

    A program that loses its engine twice in a row without progress between, while no other program did, is failed with
    ``EngineLost`` that names it; where several programs did, each is replayed alone on an engine before it is blamed.
    """

    def __init__(
        self,
        *,
        tokenize: Callable[[Sequence[AnyOp]], Sequence[int]],
        limits: FleetLimits | None = None,
        on_lost: Callable[[str, PhloemError], None] | None = None,
    ) -> None:
        raise NotImplementedError

    def add(self, engine: str, client: Client) -> None:
        """An engine is ready; programs that wait are placed. The fleet closes ``client``.

        Raises InvalidParams where its model, vocabulary or context differs from the others'.
        """
        raise NotImplementedError

    def drain(self, engine: str) -> None:
        """Place nothing more there, and move what runs there to other engines."""
        raise NotImplementedError

    def remove(self, engine: str, error: PhloemError) -> None:
        """The engine is lost or to be stopped: its programs are replayed elsewhere."""
        raise NotImplementedError

    def give_up(self, error: PhloemError) -> None:
        """No engine will come again: every program fails once, with ``error``."""
        raise NotImplementedError

    # -- the face of Client ---------------------------------------------------------------------------------------

    @property
    def welcome(self) -> Welcome:
        """Of the first engine. Its limits hold for all."""
        raise NotImplementedError

    def submit(self, submit: Submit, call: ProgramCall) -> None:
        raise NotImplementedError

    def cancel(self, program: str, seq: int | None = None, op: int | None = None) -> None:
        raise NotImplementedError

    def query(self, what: str, timeout_s: float = 10.0) -> Any:
        """``Client.query``'s answers of one engine; of several, ``metrics`` are summed and ``flush_cache`` goes to all.

        ``fleet``: a ``FleetReport`` as a dict.
        """
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
