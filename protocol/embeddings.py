"""Embeddings of a decoder, by programs: the ops that compute vectors, and a program's vectors as they come."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from .errors import InvalidRequest, PhloemError
from .messages import Done, Embedded, EmbeddingMeta, Welcome
from .ops import AnyOp, Close, Embedding, Pooling, Special, Text
from .program_call import OpFailed, ProgramCall, ProgramEvent, ProgramTransport, SubmitRefused

BATCH = 256  # inputs of one program, so that a long request does not fill the queue


def gives_embeddings(welcome: Welcome) -> bool:
    """Whether the model is a decoder that runs the op ``Embedding``."""
    return "text" in welcome.capabilities and welcome.embedding_size > 0


def embedding_ops(inputs: Sequence[str | Sequence[int]], pooling: Pooling) -> list[AnyOp]:
    """A program with a sequence for each text or list of token ids."""
    ops: list[AnyOp] = []
    for seq, given in enumerate(inputs):
        first = len(ops)
        if isinstance(given, str):
            ops.append(Text(op=first, seq=seq, text=given))
        else:
            ops.append(Special(op=first, seq=seq, ids=tuple(given)))
        ops += (Embedding(op=first + 1, seq=seq, pooling=pooling), Close(op=first + 2, seq=seq))
    return ops


def check_inputs(inputs: Sequence[str | Sequence[int]], *, first: int = 0) -> None:
    """Raises InvalidRequest for no input and for an empty one."""
    if not inputs:
        raise InvalidRequest("input is empty; give at least one text or list of token ids", where="input")
    for i, given in enumerate(inputs, first):
        if not given:
            raise InvalidRequest(f"input.{i} is empty; give a text or token ids", where=f"input.{i}")


class VectorsComing:
    """The vectors of a program of ``embedding_ops``; ``first`` is the place of its first input in the request."""

    def __init__(self, count: int, *, first: int = 0) -> None:
        self._first = first
        self._vectors: list[bytes] = [b""] * count
        self._num_tokens = [0] * count
        self._num_missing = count

    @property
    def is_whole(self) -> bool:
        return not self._num_missing

    def take(self, event: ProgramEvent) -> None:
        """Raises the error of an input, with its place as ``where``, and the error of a submit that was refused."""
        if isinstance(event, Done) and isinstance(event.meta, EmbeddingMeta):
            at = event.op // 3
            self._vectors[at], self._num_tokens[at] = event.value, event.meta.prompt_tokens
            self._num_missing -= 1
        elif isinstance(event, OpFailed):
            error = event.error
            if isinstance(error, InvalidRequest):
                error.where = f"input.{self._first + event.op // 3}"
            raise error
        elif isinstance(event, SubmitRefused):
            raise event.error

    def embedded(self) -> Embedded:
        return Embedded(self._vectors, self._num_tokens)


def embed_by_program(
    client: ProgramTransport, inputs: Sequence[str | Sequence[int]], pooling: Pooling, *, first: int = 0
) -> Future[Embedded]:
    """The vectors of at most ``BATCH`` inputs. Cancelling the future, or a failure of an input, ends the program.

    ``first``: as of ``VectorsComing``. Raises InvalidRequest for no input and for an empty one.
    """
    check_inputs(inputs, first=first)
    coming, found = VectorsComing(len(inputs), first=first), Future[Embedded]()

    def settle(error: PhloemError | None) -> None:
        if not found.done() and found.set_running_or_notify_cancel():
            if error is None:
                found.set_result(coming.embedded())
            else:
                found.set_exception(error)

    def take(event: ProgramEvent) -> None:
        if found.done():
            return
        try:
            coming.take(event)
        except PhloemError as error:
            settle(error)
            call.cancel()
            return
        if coming.is_whole:
            settle(None)

    call = ProgramCall(client, take)
    found.add_done_callback(lambda _: call.cancel() if found.cancelled() else None)
    call.submit(embedding_ops(inputs, pooling))
    return found
