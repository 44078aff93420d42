"""An image cut into the square tiles that the encoder reads, as Idefics3's processor does (Laurençon et al., 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..weights.vision_config import LONGEST_RESIZED, ImageForm

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Grid:
    """``rows`` x ``columns`` tiles of an image, and the whole image as one more; 0 x 0: the whole image alone."""

    rows: int
    columns: int

    @property
    def num_tiles(self) -> int:
        return self.rows * self.columns + 1


@dataclass(frozen=True, slots=True)
class Cut:
    """The sizes (width, height) that an image has on the way to its tiles."""

    sizes: tuple[tuple[int, int], ...]
    grid: Grid


def plan_cut(width: int, height: int, form: ImageForm) -> Cut:
    """How an image of ``width`` x ``height`` pixels is cut. It costs no pixels: tokens are counted with it."""
    sizes, side = [], form.tile_side
    if form.resized_side:
        width, height = _longer_side(width, height, form.resized_side)
        sizes.append((width, height))
    if not form.is_split:
        return Cut((*sizes, (side, side)), Grid(0, 0))
    width, height = _whole_tiles(width, height, side)
    sizes.append((width, height))
    if width <= side and height <= side:
        return Cut(tuple(sizes), Grid(0, 0))
    return Cut(tuple(sizes), Grid(height // side, width // side))


def tiles_of(image: Image, form: ImageForm) -> tuple[Grid, np.ndarray]:
    """``image`` is RGB; its tiles uint8 [N, side, side, 3], row by row, the whole image last."""
    from PIL.Image import Resampling

    filter_ = Resampling[form.resample.upper()]
    width, height = image.size
    cut, side = plan_cut(width, height, form), form.tile_side
    for size in cut.sizes:
        image = image.resize(size, filter_)
    if not cut.grid.rows:
        return cut.grid, np.asarray(image)[None]
    whole = np.asarray(image.resize((side, side), filter_))
    pixels = np.asarray(image).reshape(cut.grid.rows, side, cut.grid.columns, side, 3)
    tiles = pixels.swapaxes(1, 2).reshape(-1, side, side, 3)
    return cut.grid, np.concatenate((tiles, whole[None]))


def normalised(tiles: np.ndarray, form: ImageForm) -> np.ndarray:
    """float32 [N, 3, side, side] of ``tiles`` uint8 [N, side, side, 3]."""
    scaled = (tiles.astype(np.float64) * form.scale).astype(np.float32)
    found = (scaled - np.array(form.mean, np.float32)) / np.array(form.deviation, np.float32)
    return np.ascontiguousarray(found.transpose(0, 3, 1, 2))


def _longer_side(width: int, height: int, side: int) -> tuple[int, int]:
    """The longer side becomes ``side``; the other follows, rounded to an even number, and is at least 1."""
    aspect = width / height
    if width >= height:
        width, height = side, int(side / aspect)
        height += height % 2
    else:
        width, height = int(side * aspect), side
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > LONGEST_RESIZED:
        width, height = LONGEST_RESIZED, int(LONGEST_RESIZED / aspect)
    elif height > width and height > LONGEST_RESIZED:
        width, height = int(LONGEST_RESIZED * aspect), LONGEST_RESIZED
    return max(width, 1), max(height, 1)


def _whole_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """The next size that whole tiles cover."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / aspect) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * aspect) / side) * side
    return max(width, side), max(height, side)
