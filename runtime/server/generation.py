"""A generation on its way: a job's program at the engine, read as pieces of text and finished results."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol import errors
from ...protocol.messages import Delta, Done, GenMeta
from ...protocol.program_call import OpFailed, SubmitRefused
from .bridge import Bridge
from .jobs import Job


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of candidate ``delta.index`` of prompt ``prompt``."""

    prompt: int
    delta: Delta


@dataclass(frozen=True, slots=True)
class Result:
    """All candidates of prompt ``prompt``, finished."""

    prompt: int
    texts: tuple[str, ...]
    meta: GenMeta


class Generation:
    """Ends when every Gen has its result, or with the first failure; ``close`` before that cancels the program."""

    def __init__(self, bridge: Bridge, job: Job) -> None:
        """Send ``job``. Raises what the client raises; what the engine refuses is raised by ``events``."""
        self.opened_s = time.perf_counter()
        self.first_text_s: float | None = None
        self._bridge = bridge
        self._prompt_of = {op: i for i, op in enumerate(job.gens)}
        self._unfinished = set(job.gens)
        self._failure: errors.PhloemError | None = None
        self.bridged = bridge.send(job.ops, job.settings)

    async def events(self) -> Sequence[Piece | Result]:
        """What has come since the last call, at least one; empty at the end. Raises the failure."""
        while self._unfinished and self._failure is None:
            found: list[Piece | Result] = []
            for event in await self.bridged.events():
                if type(event) is Delta:
                    if self.first_text_s is None:
                        self.first_text_s = time.perf_counter()
                    found.append(Piece(self._prompt_of[event.op], event))
                elif type(event) is Done:
                    if event.op in self._unfinished:
                        assert isinstance(event.meta, GenMeta)
                        self._unfinished.discard(event.op)
                        found.append(Result(self._prompt_of[event.op], tuple(event.value), event.meta))
                elif isinstance(event, OpFailed | SubmitRefused) and self._unfinished:
                    self._failure = event.error
                    break
            if found:
                return found
        if self._failure is not None:
            raise self._failure
        return ()

    async def results(self) -> list[Result]:
        """The result of every prompt, in order."""
        found: dict[int, Result] = {}
        while events := await self.events():
            found.update((event.prompt, event) for event in events if isinstance(event, Result))
        return [found[i] for i in sorted(found)]

    def close(self) -> None:
        """Cancel the prompts that are not finished."""
        if self._unfinished:
            self.bridged.call.cancel()
        self._bridge.release(self.bridged)
