import json
from pathlib import Path

import pytest
import torch
from phloem.protocol.errors import UnknownModel, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.vision.decoding import decode_pixels, open_image
from phloem.runtime.vision.model import load_vision, tile_positions
from phloem.runtime.vision.tiles import normalised, tiles_of
from phloem.tests.runtime.vision.tiny_vision import picture

FLOAT32 = EngineConfig(model="tiny", precision="float32")


def test_an_image_s_vectors_are_those_of_transformers(vision_folder: Path, reference: torch.nn.Module) -> None:
    ours = load_vision(vision_folder, FLOAT32, hidden_size=64)
    grid, tiles = tiles_of(decode_pixels(open_image(picture(1))), ours.config.form)
    pixels = torch.from_numpy(normalised(tiles, ours.config.form))
    with torch.no_grad():
        found = reference.model.get_image_features(pixels[None]).pooler_output
    want = torch.cat([part.reshape(-1, 4, 64) for part in found])
    got = ours.encode(tiles)
    assert grid.rows > 1 and got.shape == (grid.num_tiles, 4, 64) == want.shape
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    one = torch.cat([ours.encode(tile[None]) for tile in tiles])
    assert (one - got).abs().max() <= 1e-5 * want.abs().max()


def test_positions_of_a_smaller_tile_are_spread_over_the_table() -> None:
    assert tile_positions(3, 3).tolist() == list(range(9))
    assert tile_positions(2, 4).tolist() == [0, 2, 8, 10]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vision_config", {"num_attention_heads": 5}, "5 heads cannot share 32 dimensions"),
        ("vision_config", {"hidden_size": 36}, r"tensor model.vision_model.* is \[32, 3, 4, 4\], but its config asks"),
        ("vision_config", {"hidden_act": "relu"}, "hidden_act 'relu' of the image encoder; only gelu_pytorch_tanh"),
        ("vision_config", {"num_hidden_layers": 1}, "belongs to no layer of the image encoder"),
        ("vision_config", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1,000,000,000,000; it must be"),
        ("vision_config", {"patch_size": 3}, "5 patches a side cannot be joined 2 by 2"),
        ("text_config", {"model_type": "mistral"}, "a text model of type 'mistral'"),
    ],
)
def test_a_config_that_cannot_be_right_is_refused(
    vision_folder: Path, tmp_path: Path, part: str, change: dict[str, object], message: str
) -> None:
    for file in vision_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((vision_folder / "config.json").read_text())
    config[part] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((Unsupported, UnknownModel), match=message):
        load_vision(tmp_path, FLOAT32, hidden_size=64)


def test_a_folder_without_the_processor_s_config_is_refused(vision_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((vision_folder / "config.json").read_bytes())
    with pytest.raises(Unsupported, match=r"has no preprocessor_config.json, which says how its images are cut"):
        load_vision(tmp_path, FLOAT32, hidden_size=64)
