"""Runs ``Image`` ops: an image's file is decoded and encoded on a thread, then its tokens are appended."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial
from typing import Any

from ...protocol.errors import InternalError, PhloemError
from ...protocol.ops import Image
from ..vision.images import Images
from ..vision.tiles import Grid
from .beside import Beside
from .program import OpState, Program, SequenceState
from .programs import Programs

log = logging.getLogger(__name__)


class ImageOps:
    """A sequence waits at its image until the image's vectors are there. One image at a time is encoded.

    An image whose tokens the cache holds, after the same tokens, is neither decoded nor encoded.
    """

    def __init__(self, programs: Programs, images: Images) -> None:
        self._programs = programs
        self._images = images
        self._beside = Beside(programs.ready, name="images")

    @property
    def futures(self) -> list[Future[Any]]:
        return self._beside.futures

    def start(self, owner: SequenceState, op_state: OpState, op: Image) -> None:
        pictures, tokenizer = owner.program.pictures, self._programs.tokenizer
        picture = pictures.get(op.hash)
        if picture is None:
            picture = pictures[op.hash] = self._images.hold(op.hash, op.data or _data_of(owner.program, op.hash))
        owner.flush_text(tokenizer)
        num_left = self._programs.context_len - len(owner.seq.tokens)
        grid = self._images.grid_of(op.hash)
        if grid is not None and self._is_cached(owner, op, grid):
            self._append(owner, op_state, op, grid)
            return
        self._beside.begin(
            owner,
            lambda is_wanted: self._images.read(picture, num_left=num_left, is_wanted=is_wanted),
            partial(self._append, owner, op_state, op),
        )

    def poll(self) -> None:
        """Append the images that have been encoded."""
        self._beside.poll(self._fail)

    def close(self) -> None:
        self._beside.close()

    def _is_cached(self, owner: SequenceState, op: Image, grid: Grid) -> bool:
        tokens = owner.seq.tokens.copy()
        tokens.extend(self._images.token_ids(owner.program.pictures[op.hash], grid))
        return self._programs.scheduler.cache.peek(tokens.ids, namespace=owner.seq.namespace) == len(tokens)

    def _append(self, owner: SequenceState, op_state: OpState, op: Image, grid: Grid) -> None:
        ids = self._images.token_ids(owner.program.pictures[op.hash], grid)
        if (too_long := self._programs.too_long(owner, num_ids=len(ids))) is not None:
            self._programs.fail_op(owner, op_state, too_long)
            return
        owner.append_tokens(ids.tolist(), self._images.text, "special", self._programs.tokenizer)
        self._programs.finish_op(owner, op_state)

    def _fail(self, owner: SequenceState, error: BaseException) -> None:
        if not isinstance(error, PhloemError):
            log.error("an image of program %s failed", owner.program.id, exc_info=error)
            error = InternalError(f"{type(error).__name__}: {error}")
        self._programs.fail_first(owner, error)


def _data_of(program: Program, hash: str) -> bytes:
    """The image's data, which an op of the program has sent that may not have begun, or has failed before it could."""
    sent = (state.op for state in program.ops.values())
    return next(op.data for op in sent if isinstance(op, Image) and op.hash == hash and op.data)
