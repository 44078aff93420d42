"""The images of an engine: their token ids, and their vectors, computed once for each content."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from threading import Lock
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import torch

from ...protocol.errors import Cancelled, InternalError, Overloaded, PromptTooLong
from ...radix_cache import Contents, OutOfContentIds
from .decoding import decode_pixels, open_image, upright_size
from .model import VisionModel
from .prompt import ImagePrompt
from .tiles import Grid, plan_cut, tiles_of

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20  # of vectors that are kept
TILES_A_TIME = {"cpu": 1}  # that are encoded together; on other devices 8


class Picture:
    """An image file that programs hold. ``hash``: of its bytes."""

    __slots__ = ("__weakref__", "data", "hash")

    def __init__(self, hash: str, data: bytes) -> None:
        self.hash = hash
        self.data = data


class Images:
    """``read`` runs on a thread beside the steps; everything else belongs to the engine's thread.

    The vectors that were used last are kept, up to ``max_bytes``. If those of a running sequence are gone when its
    image has to be computed again, after a preemption, they are encoded again in the step.
    """

    def __init__(
        self, model: VisionModel, prompt: ImagePrompt, contents: Contents, *, max_bytes: int = MAX_BYTES
    ) -> None:
        self.placeholder = prompt.image_token_id
        self.num_encoded = 0  # images
        self._model = model
        self._prompt = prompt
        self._contents = contents
        self._max_bytes = max_bytes
        self.form = model.config.form
        self._pictures: WeakValueDictionary[str, Picture] = WeakValueDictionary()
        self._grids: dict[str, Grid] = {}
        self._firsts: list[int] = []  # of each image that has ids, ascending
        self._hashes: list[str] = []
        self._vectors: OrderedDict[str, torch.Tensor] = OrderedDict()  # [content tokens, C]
        self._size_bytes = 0
        self._lock = Lock()  # of the vectors

    def hold(self, hash: str, data: bytes) -> Picture:
        """The picture, which the caller keeps as long as its tokens may be computed."""
        return self._pictures.setdefault(hash, Picture(hash, data))

    def grid_of(self, hash: str) -> Grid | None:
        """How the image is cut, if it was read before."""
        return self._grids.get(hash)

    def read(self, picture: Picture, *, num_left: int, is_wanted: Callable[[], bool]) -> Grid:
        """Decode and encode ``picture``, unless its vectors are there. ``num_left``: tokens that the context holds yet.

        The tokens are counted from the file's header, before a pixel is decoded. Raises PromptTooLong, the errors of
        ``decoding``, and Cancelled between two tiles once ``is_wanted()`` is False.
        """
        image = open_image(picture.data)
        grid = plan_cut(*upright_size(image), self.form).grid
        num_tokens = len(self._prompt.token_ids(grid, 0))
        if num_tokens > num_left:
            raise PromptTooLong(
                f"an image of {image.size[0]:,} x {image.size[1]:,} pixels takes {num_tokens:,} tokens, but "
                f"{num_left:,} are left of the context; send a smaller image, or start with a larger --max-seq-len"
            )
        with self._lock:
            if picture.hash in self._vectors:
                return grid
        self._keep(picture.hash, self._encode(picture, is_wanted))
        return grid

    def token_ids(self, picture: Picture, grid: Grid) -> np.ndarray:
        """int32: the tokens of the whole image, with its marks."""
        form = msgspec.json.encode(self.form)
        digest = blake2b(form + picture.hash.encode(), digest_size=32).digest()
        try:
            first = self._contents.first_id(digest, self._prompt.num_content_tokens(grid))
        except OutOfContentIds:
            raise Overloaded("this engine has seen more images than it can number; restart it") from None
        if picture.hash not in self._grids:
            self._grids[picture.hash] = grid
            self._firsts.append(first)
            self._hashes.append(picture.hash)
        return self._prompt.token_ids(grid, first)

    @property
    def text(self) -> str:
        """What stands for an image in a sequence's text."""
        return self._prompt.image_text

    def rows(self, token_ids: np.ndarray) -> torch.Tensor:
        """The decoder's inputs [G, C] for tokens of images."""
        runs = np.searchsorted(self._firsts, token_ids, side="right") - 1
        starts = np.flatnonzero(np.diff(runs, prepend=-1))
        parts = []
        for start, end in zip(starts, [*starts[1:], len(runs)], strict=True):
            run = int(runs[start])
            offsets = torch.from_numpy(token_ids[start:end].astype(np.int64) - self._firsts[run])
            found = self._vectors_of(self._hashes[run])
            parts.append(found[offsets.to(found.device)])
        return torch.cat(parts)

    def forget_vectors(self) -> None:
        """Those of images whose tokens are computed again are then encoded again."""
        with self._lock:
            self._vectors.clear()
            self._size_bytes = 0

    def _vectors_of(self, hash: str) -> torch.Tensor:
        with self._lock:
            found = self._vectors.get(hash)
            if found is not None:
                self._vectors.move_to_end(hash)
                return found
        picture = self._pictures.get(hash)
        if picture is None:
            raise InternalError(f"image {hash[:12]} is not held by any program, but its tokens are computed")
        log.warning("image %s is encoded again, in a step: its vectors did not fit", hash[:12])
        made = self._encode(picture, lambda: True)
        self._keep(hash, made)
        return made

    def _encode(self, picture: Picture, is_wanted: Callable[[], bool]) -> torch.Tensor:
        _, tiles = tiles_of(decode_pixels(open_image(picture.data)), self.form)
        count = TILES_A_TIME.get(self._model.device.type, 8)
        parts = []
        for at in range(0, len(tiles), count):
            if not is_wanted():
                raise Cancelled("the image's op was cancelled")
            parts.append(self._model.encode(tiles[at : at + count]))
        self.num_encoded += 1
        return torch.cat(parts).flatten(0, 1)

    def _keep(self, hash: str, vectors: torch.Tensor) -> None:
        with self._lock:
            if hash in self._vectors:
                return
            self._vectors[hash] = vectors
            self._size_bytes += vectors.nbytes
            while self._size_bytes > self._max_bytes and len(self._vectors) > 1:
                _, gone = self._vectors.popitem(last=False)
                self._size_bytes -= gone.nbytes
