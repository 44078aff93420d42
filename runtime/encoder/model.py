"""An encoder's layers in float32, over texts packed one after another: no row is padding.

T: tokens of all texts, H: heads, D: a head's dimensions, E: the model's dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...protocol.errors import UnknownModel, Unsupported
from ..layers.affine import Affine
from ..models.loading import device_named
from ..weights.damage import refuse_damage
from ..weights.safetensors_file import open_shard, shards_of
from .config import Activation, EncoderConfig, Pooling, read_encoder_config

# The table of word embeddings under its names: of a bare encoder, and of one inside a larger model.
_WORDS = "embeddings.word_embeddings.weight"
_PREFIXES = ("", "bert.", "distilbert.", "mpnet.", "roberta.")
# Families whose layers have names of their own: parts of BERT's names, and theirs.
_RENAMED = {
    "distilbert": {
        "encoder.layer": "transformer.layer",
        "attention.self.query": "attention.q_lin",
        "attention.self.key": "attention.k_lin",
        "attention.self.value": "attention.v_lin",
        "attention.output.dense": "attention.out_lin",
        "attention.output.LayerNorm": "sa_layer_norm",
        "intermediate.dense": "ffn.lin1",
        "output.dense": "ffn.lin2",
        "output.LayerNorm": "output_layer_norm",
    },
    "mpnet": {
        "attention.self.query": "attention.attn.q",
        "attention.self.key": "attention.attn.k",
        "attention.self.value": "attention.attn.v",
        "attention.output.dense": "attention.attn.o",
        "attention.output.LayerNorm": "attention.LayerNorm",
    },
}
_FARTHEST = 128  # tokens farther apart share the last class of distances
# Tensors that no embedding needs: heads of the pre-training, and the numbers 0, 1, 2...
_NUMBERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_UNUSED = ("pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids", "embeddings.token_type_ids")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: Affine
    output: Affine
    attention_norm: Affine
    up: Affine
    down: Affine
    mlp_norm: Affine


@dataclass(frozen=True, slots=True)
class Classifier:
    """Logits of a text's first vector: ``output(tanh(dense(x)))``, or with a ReLU instead of the tanh."""

    dense: Affine
    output: Affine
    has_relu: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [texts, E] -> [texts, labels]
        inner = self.dense.linear(x)
        return self.output.linear(inner.relu() if self.has_relu else inner.tanh())


@dataclass(frozen=True, slots=True)
class Encoder:
    """BERT (Devlin et al., 2018), or RoBERTa and DistilBERT, which differ by their positions, types and names, or MPNet
    (Song et al., 2020), whose attention adds a bias by distance.
    """

    config: EncoderConfig
    words: torch.Tensor  # [vocab_size, E]
    positions: torch.Tensor  # [max_len, E], with the embedding of the first token type added
    norm: Affine
    layers: tuple[EncoderLayer, ...]
    device: torch.device
    second_type: torch.Tensor | None = None  # [E], added to tokens of a pair's second text
    classifier: Classifier | None = None
    distances: torch.Tensor | None = None  # [classes, H], added to scores

    @property
    def num_outputs(self) -> int:
        """Numbers of one result: the labels of a classifier, otherwise E."""
        return len(self.config.labels) or self.config.hidden_size

    @torch.inference_mode()
    def run(self, texts: Sequence[Sequence[int]], firsts: Sequence[int] | None = None) -> torch.Tensor:
        """The vector of each list of token ids, or a classifier's scores: float32 on the CPU [texts, E or labels].

        Each text has 1 to ``max_len`` ids. ``firsts``: how many of its tokens are of the first type; by default all.
        """
        if self.classifier is None:
            return self.embed(texts)
        found = self.logits(texts, firsts)
        if self.config.scores == "sigmoid":
            return found.sigmoid()
        return found.softmax(dim=1) if self.config.scores == "softmax" else found

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]], firsts: Sequence[int] | None = None) -> torch.Tensor:
        """A classifier's logits, float32 on the CPU [texts, labels]. See ``run``."""
        assert self.classifier is not None, "an encoder without a classification layer"
        if not texts:
            return torch.empty((0, self.num_outputs))
        order, lengths, x = self._body(texts, firsts)
        return self._in_order(self.classifier(_pooled(x, lengths, "cls")), order)

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """One vector for each list of token ids, float32 on the CPU [texts, E]. Each has 1 to ``max_len`` ids."""
        if not texts:
            return torch.empty((0, self.config.hidden_size))
        order, lengths, x = self._body(texts, None)
        found = _pooled(x, lengths, self.config.pooling)
        if self.config.is_normalised:
            found = F.normalize(found, dim=1)
        return self._in_order(found, order)

    def _body(
        self, texts: Sequence[Sequence[int]], firsts: Sequence[int] | None
    ) -> tuple[list[int], list[int], torch.Tensor]:
        """The texts' order by length, their lengths in that order, and the last layer's vectors [T, E]."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        lengths = [len(texts[i]) for i in order]
        ids = torch.tensor([token for i in order for token in texts[i]], dtype=torch.int64, device=self.device)  # [T]
        at = torch.cat([torch.arange(length) for length in lengths]).to(self.device)  # [T]
        x = self.words[ids] + self.positions[at]
        if firsts is not None and self.second_type is not None:
            ends = torch.tensor([firsts[i] for i in order]).repeat_interleave(torch.tensor(lengths)).to(self.device)
            x[at >= ends] += self.second_type
        x = self.norm.norm(x, self.config.norm_eps)
        bias = None if self.distances is None else bias_by_distance(self.distances, max(lengths))
        for layer in self.layers:
            x = self._layer(layer, x, lengths, bias)
        return order, lengths, x

    @staticmethod
    def _in_order(found: torch.Tensor, order: list[int]) -> torch.Tensor:
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return found.cpu()[back]

    def _layer(
        self, layer: EncoderLayer, x: torch.Tensor, lengths: list[int], bias: torch.Tensor | None
    ) -> torch.Tensor:
        eps = self.config.norm_eps
        mixed = _attention(layer.qkv.linear(x), lengths, num_heads=self.config.num_heads, bias=bias)
        x = layer.attention_norm.norm(x + layer.output.linear(mixed), eps)
        inner = _activate(layer.up.linear(x), self.config.activation)
        return layer.mlp_norm.norm(x + layer.down.linear(inner), eps)


def bias_by_distance(table: torch.Tensor, length: int) -> torch.Tensor:
    """[H, length, length]: what query i adds to the score of key j, by their distance (T5; Raffel et al., 2020).

    The first half of ``table``'s classes is for keys before the query, the second for those after it. Half of each half
    holds one distance a class, the rest grows with the logarithm up to ``_FARTHEST``.
    """
    half = len(table) // 2
    exact = half // 2
    at = torch.arange(length, device=table.device)
    ahead = at.unsqueeze(0) - at.unsqueeze(1)  # [i, j]: j - i
    far = ahead.abs()
    grown = (far.clamp_min(1).float() / exact).log() / math.log(_FARTHEST / exact) * (half - exact)
    classes = torch.where(far < exact, far, (exact + grown.long()).clamp_max(half - 1))
    return table[classes + half * (ahead > 0)].permute(2, 0, 1)


def _attention(
    qkv: torch.Tensor, lengths: list[int], *, num_heads: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Each text attends to itself alone; ``lengths`` ascend, and texts of one length run together."""
    parts, start = [], 0
    width = qkv.shape[1] // 3
    for length, group in groupby(lengths):
        count = len(list(group))
        part = qkv[start : start + count * length].view(count, length, 3, num_heads, width // num_heads)
        q, k, v = part.permute(2, 0, 3, 1, 4)  # [texts, H, length, D]
        mask = None if bias is None else bias[:, :length, :length]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        parts.append(mixed.transpose(1, 2).reshape(count * length, width))
        start += count * length
    return torch.cat(parts)


def _activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _pooled(x: torch.Tensor, lengths: list[int], pooling: Pooling) -> torch.Tensor:
    ends = torch.tensor(lengths).cumsum(0)
    if pooling == "cls":
        return x[(ends - torch.tensor(lengths)).to(x.device)]
    if pooling == "last":
        return x[(ends - 1).to(x.device)]
    return torch.stack([part.mean(0) for part in x.split(lengths)])


def load_encoder(path: Path, config: EncoderConfig | None = None, *, device: str = "cpu") -> Encoder:
    """From a folder with safetensors; ``config`` is read from it too where it is not given."""
    found = device_named(device)
    config = config or read_encoder_config(path)
    with refuse_damage(path):
        return _Loader(path, config, found).encoder()


class _Loader:
    def __init__(self, path: Path, config: EncoderConfig, device: torch.device) -> None:
        self.path, self.config, self.device = path, config, device
        self._homes: dict[str, Any] = {}
        for shard in shards_of(path):
            file = open_shard(path / shard)
            self._homes |= dict.fromkeys(file.keys(), file)
        found = [prefix for prefix in _PREFIXES if prefix + _WORDS in self._homes]
        if not found:
            raise UnknownModel(f"{path} has no tensor {_WORDS}; it is incomplete or of another architecture")
        self._prefix = found[0]
        self._unread = set(self._homes)

    def encoder(self) -> Encoder:
        config = self.config
        hidden = config.hidden_size
        words = self.read("embeddings.word_embeddings.weight", config.vocab_size, hidden)
        positions = self.read("embeddings.position_embeddings.weight", config.num_positions, hidden)
        types = torch.zeros((1, hidden), device=self.device)
        if config.family not in ("distilbert", "mpnet"):
            types = self.read("embeddings.token_type_embeddings.weight", config.num_types, hidden)
        distances = None
        if config.num_buckets:
            distances = self.read("encoder.relative_attention_bias.weight", config.num_buckets, config.num_heads)
        first = config.first_position
        norm = self.affine("embeddings.LayerNorm", hidden)
        layers = tuple(self.layer(f"encoder.layer.{i}") for i in range(config.num_layers))
        classifier = self.classifier() if config.labels else None
        unused = (*_NUMBERS, "pooler.") if config.labels else _UNUSED
        strangers = sorted(name for name in self._unread if not name.removeprefix(self._prefix).startswith(unused))
        if strangers:
            raise Unsupported(f"{self.path}: tensor {strangers[0]} belongs to no layer of a {config.family} encoder")
        return Encoder(
            config,
            words,
            positions[first : first + config.max_len] + types[0],
            norm,
            layers,
            device=self.device,
            second_type=types[1] - types[0] if config.num_types > 1 else None,
            classifier=classifier,
            distances=distances,
        )

    def classifier(self) -> Classifier:
        hidden, labels = self.config.hidden_size, len(self.config.labels)
        if self.config.family == "distilbert":
            dense = self.affine("pre_classifier", hidden, hidden, prefix="")
            return Classifier(dense, self.affine("classifier", labels, hidden, prefix=""), has_relu=True)
        if self.config.family == "bert":
            return Classifier(
                self.affine("pooler.dense", hidden, hidden), self.affine("classifier", labels, hidden, prefix="")
            )
        return Classifier(
            self.affine("classifier.dense", hidden, hidden, prefix=""),
            self.affine("classifier.out_proj", labels, hidden, prefix=""),
        )

    def layer(self, at: str) -> EncoderLayer:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        parts = [self.affine(f"{at}.attention.self.{name}", hidden, hidden) for name in ("query", "key", "value")]
        return EncoderLayer(
            qkv=Affine(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])),
            output=self.affine(f"{at}.attention.output.dense", hidden, hidden),
            attention_norm=self.affine(f"{at}.attention.output.LayerNorm", hidden),
            up=self.affine(f"{at}.intermediate.dense", inner, hidden),
            down=self.affine(f"{at}.output.dense", hidden, inner),
            mlp_norm=self.affine(f"{at}.output.LayerNorm", hidden),
        )

    def affine(self, at: str, *shape: int, prefix: str | None = None) -> Affine:
        weight = self.read(f"{at}.weight", *shape, prefix=prefix)
        return Affine(weight, self.read(f"{at}.bias", shape[0], prefix=prefix))

    def read(self, name: str, *shape: int, prefix: str | None = None) -> torch.Tensor:
        """A copy of the tensor in float32, so that the file need not stay mapped. ``prefix``: if not the model's."""
        for ours, theirs in _RENAMED.get(self.config.family, {}).items():
            name = name.replace(ours, theirs)
        stored = (self._prefix if prefix is None else prefix) + name
        if stored not in self._homes:
            raise UnknownModel(f"{self.path} has no tensor {stored}; it is incomplete or of another architecture")
        self._unread.discard(stored)
        found = self._homes[stored].get_tensor(stored)
        if found.dtype not in _FLOATS:
            known = "float32, float16 and bfloat16"
            raise Unsupported(f"{self.path}: tensor {stored} is of {found.dtype}; read are {known}")
        if tuple(found.shape) != shape:
            sizes = f"{list(found.shape)}, but its config asks for {list(shape)}"
            raise UnknownModel(f"{self.path}: tensor {stored} is {sizes}")
        return found.to(self.device, torch.float32, copy=True)
