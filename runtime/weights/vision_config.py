"""The image encoder of a vision model (Idefics3, SmolVLM): its sizes, and how it wants its images."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from ...protocol.errors import Unsupported
from .config_reader import ConfigReader
from .damage import shown
from .json_file import read_json

VISION_TYPES = ("idefics3", "smolvlm")
# Tensors of these models that the decoder does not read.
VISION_PREFIXES = ("model.vision_model.", "model.connector.")
LONGEST_RESIZED = 4096  # pixels; the reference makes no image larger
MAX_SIDE = 8192  # pixels of a tile's side, and of the side that images are resized to
_RESAMPLES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]


class ImageForm(msgspec.Struct, frozen=True):
    """What is done to an image before the encoder reads it.

    With ``resized_side`` its longer side is resized to that many pixels (0: kept). With ``is_split`` it is then cut
    into square tiles of ``tile_side`` pixels, and the whole image follows as one more tile; otherwise it is one tile.
    A pixel is scaled by ``scale``, then ``mean`` is subtracted and the rest divided by ``deviation``, by channel.
    """

    tile_side: int
    resized_side: int = 0
    is_split: bool = True
    resample: Resample = "lanczos"
    scale: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    deviation: tuple[float, float, float] = (0.5, 0.5, 0.5)


class VisionConfig(msgspec.Struct, frozen=True):
    """A vision transformer over square tiles, and the projection of its vectors into the decoder's space.

    A tile is cut into patches of ``patch_size`` pixels a side, each with one vector. Squares of ``scale_factor`` x
    ``scale_factor`` vectors become one token of the decoder each.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    num_positions_a_side: int
    norm_eps: float
    scale_factor: int
    image_token_id: int
    form: ImageForm

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "patch_size", "scale_factor"):
            if getattr(self, field) < 1:
                raise Unsupported(f"vision config: {field} is {getattr(self, field)}; it must be at least 1")
        if self.hidden_size % self.num_heads:
            raise Unsupported(f"vision config: {self.num_heads} heads cannot share {self.hidden_size} dimensions")
        if not 1 <= self.form.tile_side <= MAX_SIDE or not 0 <= self.form.resized_side <= MAX_SIDE:
            sides = f"tiles of {self.form.tile_side:,} pixels of images of {self.form.resized_side:,}"
            raise Unsupported(f"vision config: {sides}; both may be at most {MAX_SIDE:,} a side")
        if self.patches_a_side > self.num_positions_a_side:
            raise Unsupported(
                f"vision config: tiles of {self.patches_a_side} patches a side, but there are positions for "
                f"{self.num_positions_a_side}"
            )
        if not self.patches_a_side or self.patches_a_side % self.scale_factor:
            raise Unsupported(
                f"vision config: {self.patches_a_side} patches a side cannot be joined {self.scale_factor} by "
                f"{self.scale_factor}"
            )

    @property
    def patches_a_side(self) -> int:
        """Of a tile."""
        return self.form.tile_side // self.patch_size

    @property
    def tokens_a_tile(self) -> int:
        return (self.patches_a_side // self.scale_factor) ** 2


def text_config(data: dict[str, Any], *, source: str) -> dict[str, Any]:
    """The decoder's part of a vision model's config.json."""
    text = data.get("text_config")
    if not isinstance(text, dict):
        raise Unsupported(f"{source}: text_config is {shown(repr(text))}; it must be the decoder's config")
    if text.get("model_type", "llama") != "llama":
        kind = text["model_type"]
        raise Unsupported(f"{source}: a text model of type {kind!r}; of vision models only llama's is served")
    whole = {key: data[key] for key in ("eos_token_id", "bos_token_id") if data.get(key) is not None}
    return {**text, **whole, "tie_word_embeddings": bool(data.get("tie_word_embeddings", False))}


def has_vision(path: Path) -> bool:
    """Whether ``path`` is the folder of a vision model of a family that is served."""
    file = path / "config.json"
    return file.is_file() and read_json(file).get("model_type") in VISION_TYPES


def read_vision_config(path: Path) -> VisionConfig:
    """From config.json and preprocessor_config.json of the folder ``path``."""
    source = str(path / "config.json")
    data = read_json(path / "config.json")
    vision = data.get("vision_config")
    if not isinstance(vision, dict):
        raise Unsupported(f"{source}: vision_config is {shown(repr(vision))}; it must be the image encoder's config")
    read, whole = ConfigReader(vision, f"{source}: vision_config"), ConfigReader(data, source)
    if (act := vision.get("hidden_act", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise Unsupported(f"{source}: hidden_act {act!r} of the image encoder; only gelu_pytorch_tanh is served")
    if (channels := vision.get("num_channels", 3)) != 3:
        raise Unsupported(f"{source}: num_channels is {shown(repr(channels))}; only 3, of RGB, are served")
    patch_size, image_size = read.integer("patch_size", 32), read.integer("image_size", 224)
    return VisionConfig(
        num_layers=read.integer("num_hidden_layers", 12),
        hidden_size=read.integer("hidden_size", 1152),
        intermediate_size=read.integer("intermediate_size", 3072),
        num_heads=read.integer("num_attention_heads", 16),
        patch_size=patch_size,
        num_positions_a_side=image_size // max(1, patch_size),
        norm_eps=read.number("layer_norm_eps", 1e-6),
        scale_factor=whole.integer("scale_factor", 2),
        image_token_id=whole.integer("image_token_id", 128257),
        form=_read_form(path / "preprocessor_config.json"),
    )


def _read_form(file: Path) -> ImageForm:
    if not file.is_file():
        raise Unsupported(f"{file.parent} has no {file.name}, which says how its images are cut; fetch the model again")
    data, source = read_json(file), str(file)
    read = ConfigReader(data, source)
    for key in ("do_convert_rgb", "do_rescale", "do_normalize"):
        if not data.get(key, True):
            raise Unsupported(f"{source}: {key} is false; only true is served")
    resample = data.get("resample", 1)
    if resample not in _RESAMPLES:
        raise Unsupported(f"{source}: resample is {shown(repr(resample))}; it must be a number from 0 to 5")
    return ImageForm(
        tile_side=_longest(data, "max_image_size", 364, source),
        resized_side=_longest(data, "size", 4 * 364, source) if data.get("do_resize", True) else 0,
        is_split=bool(data.get("do_image_splitting", True)),
        resample=_RESAMPLES[resample],  # type: ignore[arg-type]
        scale=read.number("rescale_factor", 1 / 255),
        mean=_by_channel(data, "image_mean", source),
        deviation=_by_channel(data, "image_std", source),
    )


def _longest(data: dict[str, Any], key: str, default: int, source: str) -> int:
    sides = data.get(key) or {"longest_edge": default}
    if not isinstance(sides, dict) or set(sides) != {"longest_edge"}:
        raise Unsupported(f"{source}: {key} is {shown(repr(sides))}; served is a longest_edge alone")
    return ConfigReader(sides, f"{source}: {key}").integer("longest_edge")


def _by_channel(data: dict[str, Any], key: str, source: str) -> tuple[float, float, float]:
    found = data.get(key) or [0.5, 0.5, 0.5]
    is_list = isinstance(found, list) and len(found) == 3 and all(isinstance(x, int | float) for x in found)
    if not is_list or (key == "image_std" and not all(x > 0 for x in found)):
        raise Unsupported(f"{source}: {key} is {shown(repr(found))}; it must be three numbers")
    return (float(found[0]), float(found[1]), float(found[2]))
