"""An encoder in float32: from the token ids of texts to vectors or scores.

T: tokens of all texts, H: heads, D: a head's dimensions, E: the model's dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ...protocol.errors import UnknownModel, Unsupported
from ..layers.affine import Affine, stacked
from ..layers.rotary import plain_frequencies, rotations
from ..models.loading import device_named
from ..weights.damage import refuse_damage
from ..weights.safetensors_file import open_shard, shards_of
from .config import Activation, EncoderConfig, Pooling, read_encoder_config
from .layers import EncoderLayer, PostNormLayer, PreNormLayer, Texts, activate, bias_by_distance

# The table of word embeddings under its names: of a bare encoder, and of one inside a larger model.
_WORDS = "embeddings.word_embeddings.weight"
_PREFIXES = ("", "bert.", "distilbert.", "mpnet.", "roberta.", "model.")
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
    "modernbert": {
        "embeddings.word_embeddings": "embeddings.tok_embeddings",
        "embeddings.LayerNorm": "embeddings.norm",
    },
}
# Tensors that no embedding needs: heads of the pre-training, and the numbers 0, 1, 2...
_NUMBERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_UNUSED = ("pooler.", "cls.", "lm_head.", "vocab_", "head.", "decoder.", *_NUMBERS)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Classifier:
    """Logits of a text's vector: ``output(norm(activation(dense(x))))``. ``norm`` may be None."""

    dense: Affine
    output: Affine
    activation: Activation = "tanh"
    norm: Affine | None = None
    eps: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [texts, E] -> [texts, labels]
        inner = activate(self.dense.linear(x), self.activation)
        return self.output.linear(inner if self.norm is None else self.norm.norm(inner, self.eps))


@dataclass(frozen=True, slots=True)
class Encoder:
    """BERT (Devlin et al., 2018), or RoBERTa and DistilBERT, which differ by their positions, types and names, MPNet
    (Song et al., 2020), whose attention adds a bias by distance, or ModernBERT (Warner et al., 2024).
    """

    config: EncoderConfig
    words: torch.Tensor  # [vocab_size, E]
    positions: torch.Tensor | None  # [max_len, E], with the embedding of the first token type added
    norm: Affine  # of the embeddings
    layers: tuple[EncoderLayer, ...]
    device: torch.device
    second_type: torch.Tensor | None = None  # [E], added to tokens of a pair's second text
    classifier: Classifier | None = None
    distances: torch.Tensor | None = None  # [classes, H], added to scores
    final_norm: Affine | None = None

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
        return self._in_order(self.classifier(_pooled(x, lengths, self.config.pooling)), order)

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
        x = self.words[ids]
        if self.positions is not None:
            x += self.positions[at]
        if firsts is not None and self.second_type is not None:
            ends = torch.tensor([firsts[i] for i in order]).repeat_interleave(torch.tensor(lengths)).to(self.device)
            x[at >= ends] += self.second_type
        x = self.norm.norm(x, self.config.norm_eps)
        bias = None if self.distances is None else bias_by_distance(self.distances, max(lengths))
        packed = Texts(lengths, at, bias)
        for layer in self.layers:
            x = layer(x, packed)
        if self.final_norm is not None:
            x = self.final_norm.norm(x, self.config.norm_eps)
        return order, lengths, x

    @staticmethod
    def _in_order(found: torch.Tensor, order: list[int]) -> torch.Tensor:
        back = torch.empty(len(order), dtype=torch.int64)
        back[torch.tensor(order)] = torch.arange(len(order))
        return found.cpu()[back]


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
        words = self._own(_WORDS)
        found = [prefix for prefix in _PREFIXES if prefix + words in self._homes]
        if not found:
            raise UnknownModel(f"{path} has no tensor {words}; it is incomplete or of another architecture")
        self._prefix = found[0]
        self._unread = set(self._homes)

    def encoder(self) -> Encoder:
        config = self.config
        hidden = config.hidden_size
        words = self.read(_WORDS, config.vocab_size, hidden)
        positions = second_type = distances = final_norm = None
        if config.is_rotary:
            final_norm = self.norm("final_norm")
        else:
            positions, second_type = self.positions()
        if config.num_buckets:
            distances = self.read("encoder.relative_attention_bias.weight", config.num_buckets, config.num_heads)
        norm = self.norm("embeddings.LayerNorm")
        layers = self.rotary_layers() if config.is_rotary else self.layers()
        classifier = self.classifier() if config.labels else None
        unused = (*_NUMBERS, "pooler.") if config.labels else _UNUSED
        strangers = sorted(name for name in self._unread if not name.removeprefix(self._prefix).startswith(unused))
        if strangers:
            raise Unsupported(f"{self.path}: tensor {strangers[0]} belongs to no layer of a {config.family} encoder")
        return Encoder(
            config,
            words,
            positions,
            norm,
            layers,
            device=self.device,
            second_type=second_type,
            classifier=classifier,
            distances=distances,
            final_norm=final_norm,
        )

    def positions(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``Encoder.positions``, and what the second token type adds beyond the first."""
        config = self.config
        hidden, first = config.hidden_size, config.first_position
        table = self.read("embeddings.position_embeddings.weight", config.num_positions, hidden)
        table = table[first : first + config.max_len]
        if config.family in ("distilbert", "mpnet"):
            return table, None
        types = self.read("embeddings.token_type_embeddings.weight", config.num_types, hidden)
        return table + types[0], types[1] - types[0] if config.num_types > 1 else None

    def classifier(self) -> Classifier:
        config = self.config
        hidden, labels = config.hidden_size, len(config.labels)
        match config.family:
            case "distilbert":
                dense = self.affine("pre_classifier", hidden, hidden, prefix="")
                return Classifier(dense, self.affine("classifier", labels, hidden, prefix=""), "relu")
            case "bert":
                dense = self.affine("pooler.dense", hidden, hidden)
                return Classifier(dense, self.affine("classifier", labels, hidden, prefix=""))
            case "modernbert":
                return Classifier(
                    self.affine("head.dense", hidden, hidden, prefix="", has_bias=config.classifier_bias),
                    self.affine("classifier", labels, hidden, prefix=""),
                    config.classifier_activation,
                    self.norm("head.norm", prefix=""),
                    config.norm_eps,
                )
        return Classifier(
            self.affine("classifier.dense", hidden, hidden, prefix=""),
            self.affine("classifier.out_proj", labels, hidden, prefix=""),
        )

    def layers(self) -> tuple[EncoderLayer, ...]:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        found = []
        for i in range(config.num_layers):
            at = f"encoder.layer.{i}"
            parts = [self.affine(f"{at}.attention.self.{name}", hidden, hidden) for name in ("query", "key", "value")]
            layer = PostNormLayer(
                qkv=stacked(parts),
                output=self.affine(f"{at}.attention.output.dense", hidden, hidden),
                attention_norm=self.norm(f"{at}.attention.output.LayerNorm"),
                up=self.affine(f"{at}.intermediate.dense", inner, hidden),
                down=self.affine(f"{at}.output.dense", hidden, inner),
                mlp_norm=self.norm(f"{at}.output.LayerNorm"),
                num_heads=config.num_heads,
                eps=config.norm_eps,
                activation=config.activation,
            )
            found.append(layer)
        return tuple(found)

    def rotary_layers(self) -> tuple[EncoderLayer, ...]:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        tables = {
            is_local: rotations(plain_frequencies(hidden // config.num_heads, theta), config.max_len).to(self.device)
            for is_local, theta in ((True, config.local_theta), (False, config.global_theta))
        }
        found = []
        for i, window in enumerate(config.layer_windows):
            at, in_attention, in_mlp = f"layers.{i}", config.attention_bias, config.mlp_bias
            layer = PreNormLayer(
                qkv=self.affine(f"{at}.attn.Wqkv", 3 * hidden, hidden, has_bias=in_attention),
                output=self.affine(f"{at}.attn.Wo", hidden, hidden, has_bias=in_attention),
                attention_norm=self.norm(f"{at}.attn_norm") if i else None,  # the first reads normed embeddings
                up=self.affine(f"{at}.mlp.Wi", 2 * inner, hidden, has_bias=in_mlp),
                down=self.affine(f"{at}.mlp.Wo", hidden, inner, has_bias=in_mlp),
                mlp_norm=self.norm(f"{at}.mlp_norm"),
                num_heads=config.num_heads,
                eps=config.norm_eps,
                activation=config.activation,
                cos_sin=tables[window > 0],
                window=window,
            )
            found.append(layer)
        return tuple(found)

    def norm(self, at: str, *, prefix: str | None = None) -> Affine:
        return self.affine(at, self.config.hidden_size, prefix=prefix, has_bias=self.config.norm_bias)

    def affine(self, at: str, *shape: int, prefix: str | None = None, has_bias: bool = True) -> Affine:
        weight = self.read(f"{at}.weight", *shape, prefix=prefix)
        return Affine(weight, self.read(f"{at}.bias", shape[0], prefix=prefix) if has_bias else None)

    def read(self, name: str, *shape: int, prefix: str | None = None) -> torch.Tensor:
        """A copy of the tensor in float32, so that the file need not stay mapped. ``prefix``: if not the model's."""
        stored = (self._prefix if prefix is None else prefix) + self._own(name)
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

    def _own(self, name: str) -> str:
        """BERT's name as the family has it."""
        for ours, theirs in _RENAMED.get(self.config.family, {}).items():
            name = name.replace(ours, theirs)
        return name
