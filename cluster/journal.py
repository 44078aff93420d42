"""What a fleet keeps of a program so that another engine can carry it on: the ops sent and what came back.

Everything that an engine does follows from the ops, the seeds and the tokens drawn so far. ``replay`` makes the submits
that bring a new engine to the point where the old one was lost:

    finished Gen             ──► the same Gen with its candidates' tokens and texts (``Gen.drawn``): nothing is computed
    streaming Gen, under way ──► the same Gen with the tokens that came: the engine repeats them and draws on
    other op                 ──► as it was sent; its result follows from its seed and its inputs

What the caller has had is taken out of the new engine's messages: ends of ops that were reported, and of each stream
the characters that were delivered. If the engine repeats other characters than those, the program fails, by name.
"""

from __future__ import annotations

from ..protocol.messages import Cancel, RuntimeMessage, Submit


class Journal:
    """Of one program. The caller locks. ``max_bytes``: beyond it the program cannot be replayed (``is_whole``)."""

    def __init__(self, *, max_bytes: int) -> None:
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        raise NotImplementedError

    @property
    def progress(self) -> int:
        """Grows with every new token and every end of an op that came from an engine and was not a repetition."""
        raise NotImplementedError

    def sent(self, message: Submit | Cancel) -> None:
        """A message that the program's client has sent, seeds filled in."""
        raise NotImplementedError

    def came(self, message: RuntimeMessage) -> RuntimeMessage | None:
        """A message of the engine: what to hand to the caller of it, or None where it repeats what the caller has.

        Raises InternalError where a repeated stream differs from what was delivered.
        """
        raise NotImplementedError

    def replay(self, *, elapsed_s: float) -> list[Submit | Cancel]:
        """The messages for a new engine, in order; a deadline is shortened by ``elapsed_s``.

        Calling it starts a new repetition: ``came`` then expects the new engine's messages from the beginning.
        """
        raise NotImplementedError
