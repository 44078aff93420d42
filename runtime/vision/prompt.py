"""The tokens that stand for an image in a prompt: marks around each tile, and a run of content tokens for it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ...protocol.errors import Unsupported
from ..tokenizer import Tokenizer
from ..weights.vision_config import VisionConfig
from .tiles import Grid

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class ImagePrompt:
    """Writes images as Idefics3's processor does. A tile has ``tokens_a_tile`` tokens.

    Raises Unsupported where the vocabulary lacks a mark.
    """

    def __init__(self, tokenizer: Tokenizer, *, image_token_id: int, tokens_a_tile: int) -> None:
        if image_token_id not in tokenizer.special_ids:
            raise Unsupported(f"image_token_id {image_token_id} of the model's config is no special token here")
        self.image_token_id = image_token_id
        self.tokens_a_tile = tokens_a_tile
        self._tokenizer = tokenizer
        for mark in (_AROUND, _WHOLE):
            if len(tokenizer.encode(mark, special=True)) != 1:
                raise Unsupported(f"the vocabulary has no token {mark}, which stands around this model's images")

    @classmethod
    def of(cls, config: VisionConfig, tokenizer: Tokenizer) -> ImagePrompt:
        return cls(tokenizer, image_token_id=config.image_token_id, tokens_a_tile=config.tokens_a_tile)

    @cached_property
    def image_text(self) -> str:
        """How a template writes an image."""
        return self._tokenizer.special_text(self.image_token_id)

    def num_content_tokens(self, grid: Grid) -> int:
        return grid.num_tiles * self.tokens_a_tile

    def token_ids(self, grid: Grid, first_id: int) -> np.ndarray:
        """int32. The content's tokens are ``first_id`` and those after it, tile by tile, the whole image last."""
        marks = np.array(self._tokenizer.encode(self._text(grid), special=True), np.int32)
        lengths = np.where(marks == self.image_token_id, self.tokens_a_tile, 1)
        ids = np.repeat(marks, lengths)
        ids[ids == self.image_token_id] = first_id + np.arange(self.num_content_tokens(grid))
        return ids

    def _text(self, grid: Grid) -> str:
        """With one image token for each tile."""
        image, lines = self.image_text, []
        for row in range(1, grid.rows + 1):
            tiles = [f"{_AROUND}<row_{row}_col_{column}>{image}" for column in range(1, grid.columns + 1)]
            lines.append("".join(tiles) + "\n")
        between = "\n" if lines else ""
        return "".join(lines) + f"{between}{_AROUND}{_WHOLE}{image}{_AROUND}"
