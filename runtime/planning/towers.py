"""The image encoder of a vision model, as sizes: what it holds, and how long an image takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .hardware import Hardware

if TYPE_CHECKING:
    from ..weights.vision_config import VisionConfig

BYTES = 2.0  # of a weight: bfloat16


@dataclass(frozen=True, slots=True)
class TowerShape:
    """``products``: (outputs, inputs, rows of a tile, how often) of a tile's matrix products. ``tiles`` and ``tokens``
    are of a square image, which has the most; the tokens leave out those that mark its tiles.
    """

    products: tuple[tuple[int, int, int, int], ...]
    scores: int  # multiply-adds of a tile's queries with its keys and values
    tiles: int
    tokens: int

    @classmethod
    def of_config(cls, config: VisionConfig, width: int) -> TowerShape:
        """``width``: the decoder's dimensions."""
        from ..vision.tiles import plan_cut  # loads numpy and torch, which no flag of the command line needs

        side = config.form.resized_side or config.form.tile_side
        grid = plan_cut(side, side, config.form).grid
        tiles = grid.rows * grid.columns + 1
        patches, hidden, inner = config.patches_a_side**2, config.hidden_size, config.intermediate_size
        layers = config.num_layers
        return cls(
            (
                (hidden, 3 * config.patch_size**2, patches, 1),
                (3 * hidden, hidden, patches, layers),
                (hidden, hidden, patches, layers),
                (inner, hidden, patches, layers),
                (hidden, inner, patches, layers),
                (width, hidden * config.scale_factor**2, config.tokens_a_tile, 1),
            ),
            2 * layers * patches**2 * hidden,
            tiles,
            tiles * config.tokens_a_tile,
        )

    @property
    def size_bytes(self) -> float:
        return BYTES * sum(outputs * inputs * count for outputs, inputs, _, count in self.products)

    def image_s(self, hardware: Hardware) -> float:
        """Seconds of one image, whose tiles are encoded one after the other."""
        products_s = sum(
            count * hardware.product_s(outputs, inputs, rows, bits=16, weight_bytes=BYTES)
            for outputs, inputs, rows, count in self.products
        )
        scores_s = (
            self.scores / hardware.prefill_score_rate
            if hardware.prefill_score_rate
            else 2 * self.scores / hardware.product_rate
        )
        return self.tiles * (products_s + scores_s)
