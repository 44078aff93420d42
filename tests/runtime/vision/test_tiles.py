import io

import msgspec
import numpy as np
import pytest
from phloem.runtime.vision.decoding import decode_pixels, open_image
from phloem.runtime.vision.tiles import normalised, plan_cut, tiles_of
from phloem.runtime.weights.vision_config import ImageForm
from phloem.tests.runtime.vision.tiny_vision import PROCESSOR, RESIZED_SIDE, TILE_SIDE, picture
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

MEAN, STD = (0.5, 0.4, 0.6), (0.5, 0.6, 0.4)
FORM = ImageForm(tile_side=TILE_SIDE, resized_side=RESIZED_SIDE, mean=MEAN, deviation=STD)
SIZES = [(40, 30), (30, 41), (64, 64), (16, 16), (7, 90), (200, 3), (1, 1), (65, 33)]


OPTIONS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({}, {}),
    ({"do_image_splitting": False}, {"is_split": False}),
    ({"do_resize": False}, {"resized_side": 0}),
    ({"resample": 3}, {"resample": "bicubic"}),
]


@pytest.mark.parametrize(
    ("size", "options"),
    # Without a first resize transformers fails on very narrow images: a side becomes 0.
    [(size, options) for size in SIZES for options in OPTIONS if min(size) > 3 or "do_resize" not in options[0]],
)
def test_tiles_are_those_of_transformers(
    size: tuple[int, int], options: tuple[dict[str, object], dict[str, object]]
) -> None:
    theirs, ours = options
    form = msgspec.structs.replace(FORM, **ours)
    data = picture(size[0], size=size)
    processor = Idefics3ImageProcessorPil(**{**PROCESSOR, **theirs})
    want = processor(Image.open(io.BytesIO(data)), return_tensors="np", return_row_col_info=True)
    grid, tiles = tiles_of(decode_pixels(open_image(data)), form)
    assert (grid.rows, grid.columns) == (want["rows"][0][0], want["cols"][0][0])
    assert plan_cut(*size, form).grid == grid and len(tiles) == grid.num_tiles
    np.testing.assert_allclose(normalised(tiles, form), want["pixel_values"][0], rtol=0, atol=1e-6)
