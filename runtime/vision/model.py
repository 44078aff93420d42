"""The image encoder of Idefics3 and SmolVLM: a vision transformer, and the projection into the decoder's space.

N: tiles, P: patches of a tile, E: the encoder's dimensions, C: the decoder's, K: tokens of a tile.
Sources: SigLIP (Zhai et al., 2023) for the transformer, Idefics3 (Laurençon et al., 2024) for joining patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ...kernels.linear import has_bfloat16_products
from ...protocol.errors import UnknownModel, Unsupported
from ..config import EngineConfig
from ..layers.affine import Affine, stacked
from ..models.loading import device_named
from ..weights.damage import refuse_damage, shown
from ..weights.safetensors_file import SafetensorsFolder
from ..weights.vision_config import VisionConfig, read_vision_config
from .tiles import normalised


@dataclass(frozen=True, slots=True)
class VisionLayer:
    attention_norm: Affine
    qkv: Affine
    output: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class VisionModel:
    """``positions`` [P, E] are those of a whole tile: every tile is square and complete."""

    config: VisionConfig
    patches: Affine  # weight [E, 3 * patch_size ** 2]
    positions: torch.Tensor
    layers: tuple[VisionLayer, ...]
    norm: Affine
    projection: torch.Tensor  # [C, E * scale_factor ** 2]
    dtype: torch.dtype
    device: torch.device

    @property
    def size_bytes(self) -> int:
        found = [self.positions, self.projection]
        for part in (self.patches, self.norm, *(getattr(x, name) for x in self.layers for name in _LAYER_PARTS)):
            found += [part.weight, part.bias]
        return sum(tensor.nbytes for tensor in found)

    @torch.inference_mode()
    def encode(self, tiles: np.ndarray) -> torch.Tensor:
        """The decoder's inputs [N, K, C] for ``tiles`` uint8 [N, side, side, 3]."""
        config = self.config
        pixels = torch.from_numpy(normalised(tiles, config.form)).to(self.device, self.dtype)  # [N, 3, side, side]
        x = self.patches.linear(_patches(pixels, config.patch_size)) + self.positions  # [N, P, E]
        for layer in self.layers:
            x = x + layer.output.linear(self._attention(layer, layer.attention_norm.norm(x, config.norm_eps)))
            inner = F.gelu(layer.up.linear(layer.mlp_norm.norm(x, config.norm_eps)), approximate="tanh")
            x = x + layer.down.linear(inner)
        x = self.norm.norm(x, config.norm_eps)
        return F.linear(_joined(x, config.patches_a_side, config.scale_factor), self.projection)

    def _attention(self, layer: VisionLayer, x: torch.Tensor) -> torch.Tensor:  # [N, P, E] -> [N, P, E]
        num_tiles, num_patches, width = x.shape
        heads = self.config.num_heads
        qkv = layer.qkv.linear(x).view(num_tiles, num_patches, 3, heads, width // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [N, H, P, D]
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


_LAYER_PARTS = ("attention_norm", "qkv", "output", "mlp_norm", "up", "down")


def _patches(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """[N, P, 3 * size ** 2] of [N, 3, side, side]; pixels that fill no patch are left out."""
    side = pixels.shape[2] // size
    cut = pixels[:, :, : side * size, : side * size].unflatten(2, (side, size)).unflatten(4, (side, size))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def _joined(x: torch.Tensor, side: int, factor: int) -> torch.Tensor:
    """Squares of ``factor`` x ``factor`` vectors of [N, P, E] as one each: [N, K, E * factor ** 2]."""
    num_tiles, _, width = x.shape
    small = side // factor
    squares = x.view(num_tiles, small, factor, small, factor, width)
    return squares.permute(0, 1, 3, 2, 4, 5).reshape(num_tiles, small * small, factor * factor * width)


def tile_positions(side: int, num_positions: int) -> torch.Tensor:
    """Each patch's row of a table of ``num_positions`` ** 2 positions, for a tile of ``side`` ** 2 patches.

    A patch takes the position at the same share of the side (NaViT; Dehghani et al., 2023), in float32 as the
    reference: rounding decides for patches that lie on a boundary.
    """
    step = 1.0 / torch.tensor(side)
    shares = (torch.arange(side, dtype=torch.float32) * step).clamp(max=1.0 - 1e-6)
    boundaries = torch.arange(1 / num_positions, 1.0, 1 / num_positions)
    at = torch.bucketize(shares, boundaries, right=True)
    return (at.unsqueeze(1) * num_positions + at).flatten()


def load_vision(path: Path, config: EngineConfig, *, hidden_size: int) -> VisionModel:
    """The image encoder of the folder ``path``, whose decoder has ``hidden_size`` dimensions."""
    device = device_named(config.device)
    is_fast = device.type != "cpu" or has_bfloat16_products()
    dtype = torch.bfloat16 if config.precision != "float32" and is_fast else torch.float32
    with refuse_damage(path):
        return _Loader(path, dtype, device).model(hidden_size)


class _Loader:
    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.path, self.dtype, self.device = path, dtype, device
        self.config = read_vision_config(path)
        self.file = SafetensorsFolder(path)
        self.unread = set(self.file.vision_names())

    def model(self, hidden_size: int) -> VisionModel:
        config = self.config
        width, size, side = config.hidden_size, config.patch_size, config.num_positions_a_side
        kernel = self.read("vision_model.embeddings.patch_embedding.weight", width, 3, size, size)
        bias = self.read("vision_model.embeddings.patch_embedding.bias", width)
        table = self.read("vision_model.embeddings.position_embedding.weight", side * side, width)
        projected = width * config.scale_factor**2
        found = VisionModel(
            config,
            Affine(kernel.flatten(1), bias),
            table[tile_positions(config.patches_a_side, side).to(self.device)],
            tuple(self.layer(f"vision_model.encoder.layers.{i}") for i in range(config.num_layers)),
            self.affine("vision_model.post_layernorm", width),
            self.read("connector.modality_projection.proj.weight", hidden_size, projected),
            dtype=self.dtype,
            device=self.device,
        )
        strangers = sorted(name for name in self.unread if not name.endswith(".position_ids"))
        if strangers:
            raise Unsupported(f"{self.path}: tensor {shown(strangers[0])} belongs to no layer of the image encoder")
        return found

    def layer(self, at: str) -> VisionLayer:
        width, inner = self.config.hidden_size, self.config.intermediate_size
        parts = [self.affine(f"{at}.self_attn.{name}_proj", width, width) for name in "qkv"]
        return VisionLayer(
            attention_norm=self.affine(f"{at}.layer_norm1", width),
            qkv=stacked(parts),
            output=self.affine(f"{at}.self_attn.out_proj", width, width),
            mlp_norm=self.affine(f"{at}.layer_norm2", width),
            up=self.affine(f"{at}.mlp.fc1", inner, width),
            down=self.affine(f"{at}.mlp.fc2", width, inner),
        )

    def affine(self, at: str, *shape: int) -> Affine:
        return Affine(self.read(f"{at}.weight", *shape), self.read(f"{at}.bias", shape[0]))

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """A copy of the tensor, so that the file need not stay mapped."""
        stored = f"model.{name}"
        if (there := self.file.shape(stored)) != shape:
            raise UnknownModel(f"{self.path}: tensor {stored} is {list(there)}, but its config asks for {list(shape)}")
        self.unread.discard(stored)
        found = self.file.tensor(stored)
        assert isinstance(found, torch.Tensor)
        return found.to(self.device, self.dtype, copy=True)
