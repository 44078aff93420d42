"""Which part of a model's weights belongs to each rank of a tensor-parallel group.

    query and key/value heads   in groups that share a key/value head; with more ranks than these, several ranks hold a
                                copy of one key/value head, and share out its query heads
    experts                     whole, with ``expert_parallel``; each of its parts may split their inner dimensions too
    the MLP's inner dimensions  in pieces of whole blocks of packed weights
    the vocabulary              in pieces of 32 tokens, one word of a grammar's mask

Shares are neighbours, and their sizes differ by one piece at most. (Megatron-LM: Shoeybi et al., 2019.)
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import msgspec
import torch

from ...protocol.errors import InvalidParams, UnknownModel, Unsupported
from ..models.names import TensorNames
from ..quant import FORMATS, GroupTensor, QuantTensor, Weight
from ..weights.model_config import ModelConfig
from ..weights.part import Part, stored_bytes
from ..weights.weight_file import WeightFile

MASK_WORD = 32  # tokens
BLOCK_LEN = 32  # weights of a packed group


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part, as ranges of the whole model's heads, inner dimensions and tokens."""

    rank: int
    size: int
    config: ModelConfig  # of the whole model
    heads: range
    kv_heads: range
    inner: range  # of the MLP
    experts: range  # of each mixture
    expert_inner: range  # of each of these experts
    shared_inner: range  # of the expert for all tokens
    vocab: range

    def local_config(self) -> ModelConfig:
        """The config of a model that holds this share alone."""
        return msgspec.structs.replace(
            self.config,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.inner),
            expert_size=len(self.expert_inner),
            shared_expert_size=len(self.shared_inner),
            vocab_size=len(self.vocab),
        )

    @property
    def query_rows(self) -> range:
        latent = self.config.latent
        return _scaled(self.heads, self.config.head_dim if latent is None else latent.query_dim)

    @property
    def output_columns(self) -> range:
        """Of the product after attention."""
        latent = self.config.latent
        return _scaled(self.heads, self.config.head_dim if latent is None else latent.value_dim)

    @property
    def kv_rows(self) -> range:
        return _scaled(self.kv_heads, self.config.head_dim)

    @property
    def qkv_rows(self) -> tuple[range, range, range]:
        """Of a fused projection: queries, keys, values."""
        dim = self.config.head_dim
        keys = self.config.num_heads * dim
        values = keys + self.config.num_kv_heads * dim
        return self.query_rows, _moved(self.kv_rows, keys), _moved(self.kv_rows, values)

    @property
    def gate_up_rows(self) -> tuple[range, range]:
        """Of a fused projection: gates, then the others."""
        return self.inner, _moved(self.inner, self.config.intermediate_size)


def share_of(config: ModelConfig, *, rank: int, size: int, piece_len: int = BLOCK_LEN, expert_parts: int = 1) -> Share:
    """``piece_len``: inner dimensions that stay together where the MLP has whole pieces of that length.
    ``expert_parts``: among so many groups of ranks the experts are shared out; it divides ``size``.

    Raises InvalidParams where the model has too few heads, pieces or tokens for ``size`` ranks, Unsupported for weights
    whose rows are not those of heads.
    """
    if size > 1:
        _refuse_unsplit(config, size)
    heads, kv_heads = _heads(config, rank, size)
    if expert_parts > max(1, config.num_experts):
        has = f"{config.num_experts:,} experts; at most as many ranks" if config.num_experts else "no experts; leave it"
        raise InvalidParams(
            f"expert_parallel={expert_parts}: this {config.family} model has {has}"
            + (" can each have some of them" if config.num_experts else " at 1"),
            where="expert_parallel",
        )
    each = size // expert_parts  # ranks that split the inner dimensions of the same experts
    return Share(
        rank,
        size,
        config,
        heads,
        kv_heads,
        _pieces("inner dimensions of the MLP", config.intermediate_size, piece_len, rank, size),
        even_parts(config.num_experts, expert_parts)[rank // each],
        _pieces("inner dimensions of an expert", config.expert_size, piece_len, rank % each, each),
        _pieces("inner dimensions of the shared expert", config.shared_expert_size, piece_len, rank, size),
        _pieces("tokens of the vocabulary", config.vocab_size, MASK_WORD, rank, size),
    )


def _refuse_unsplit(config: ModelConfig, size: int) -> None:
    kinds = {
        "matrices stored as [inputs, outputs]": config.transposed,
        "query, key and value rows mixed by head": config.qkv_by_head,
        "one norm over all heads": config.whole_qk_norm,
    }
    for kind, has in kinds.items():
        if has:
            raise Unsupported(
                f"tensor_parallel={size}: this {config.family} model has {kind}, which are not split; set it to 1",
                where="tensor_parallel",
            )


def even_parts(count: int, size: int) -> list[range]:
    """``count`` things as ``size`` neighbouring ranges, the longer ones first."""
    least, more = divmod(count, size)
    starts = [i * least + min(i, more) for i in range(size + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def piece_len_of(file: WeightFile) -> int:
    """Inner dimensions that a split may not part: the longest block of weights along them, at least 32."""
    found = BLOCK_LEN
    if file.format != "gguf":
        return found
    names, present = TensorNames(file.config, file.format), frozenset(file.names())
    for layer in range(file.config.num_layers):
        for key in ("down", "expert_down", "shared_down"):
            if key in names.layer_keys and names.of_layer(layer, key) in present:
                weight = file.tensor(names.of_layer(layer, key))
                if isinstance(weight, QuantTensor):
                    found = lcm(found, FORMATS[weight.kind].block_len)
    return found


class SharedFile:
    """A weight file as one rank reads it: ``config`` and every tensor are those of the rank's share.

    ``read_bytes``: the bytes of each tensor that was read, as the file stores them. ``not_copied``: which of its
    tensors, by our keys, sequence-parallel ranks do not all read; None: there is one of these ranks alone.
    """

    def __init__(self, file: WeightFile, share: Share, *, not_copied: Set[str] | None = None) -> None:
        self._file, self._share, self._not_copied = file, share, not_copied
        self.format, self.path = file.format, file.path
        self.config = share.local_config()
        self.read_bytes: dict[str, int] = {}
        self._parts = _Parts(share, file.format)

    def names(self) -> list[str]:
        return self._file.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(name)

    def tensor(self, name: str, part: Part | None = None) -> Weight:
        """Raises Unsupported for a tensor that has no rule for splitting it."""
        assert part is None, "a share is not parted again"
        if self._share.size == 1:
            found = self._file.tensor(name)
            self.read_bytes[name] = stored_bytes(found)
            return found
        own, shape = self._parts.of(name), self._file.shape(name)
        self._parts.check(name, shape, str(self.path))
        found = self._file.tensor(name, own)
        if self._parts.is_added_once(name) and self._share.rank:
            assert isinstance(found, torch.Tensor)
            return found.new_zeros(found.shape)
        assert not isinstance(found, GroupTensor), "files refuse to read quantized safetensors in parts"
        self.read_bytes[name] = stored_bytes(found)
        return found

    def has_packed(self) -> bool:
        return self._file.has_packed()

    def release(self) -> None:
        self._file.release()

    def unpacked(self) -> str:
        return self._file.unpacked()

    @property
    def replicated_bytes(self) -> int:
        """Of the tensors that every rank of these layers reads whole."""
        if self._share.size == 1:
            if self._not_copied is None:
                return 0
            return sum(size for name, size in self.read_bytes.items() if self._parts.key(name) not in self._not_copied)
        whole = (name for name in self.read_bytes if self._parts.of(name) is None)
        return sum(self.read_bytes[name] for name in whole if not self._parts.is_added_once(name))


class _Parts:
    """The rule for each tensor of a file, by name."""

    def __init__(self, share: Share, file_format: str) -> None:
        self._share = share
        self._names: dict[str, str] = {}  # name in the file -> our key
        names = TensorNames(share.config, file_format)
        config = share.config
        for key in names.model_keys:
            self._names[names.of_model(key)] = key
        for key in names.layer_keys:
            for layer in range(config.num_layers):
                if key in _EXPERTS:
                    for expert in range(config.num_experts if file_format != "gguf" else 1):
                        self._names[names.of_expert(layer, expert, key)] = key
                else:
                    self._names[names.of_layer(layer, key)] = key
        inner = share.expert_inner
        gate: tuple[range, ...] = (inner,)
        down = (range(config.hidden_size),)
        if file_format == "gguf":  # the experts of a layer lie one under another
            gate = tuple(_moved(inner, i * config.expert_size) for i in share.experts)
            down = (_scaled(share.experts, config.hidden_size),)
        vocab, query, kv, mlp = (Part((x,)) for x in (share.vocab, share.query_rows, share.kv_rows, share.inner))
        self._rules: dict[str, Part | None] = {
            **dict.fromkeys(("embedding", "head"), vocab),
            **dict.fromkeys(("q", "q_bias", "q_up"), query),
            **dict.fromkeys(("k", "v", "k_bias", "v_bias"), kv),
            **dict.fromkeys(("qkv", "qkv_bias"), Part(share.qkv_rows)),
            "output": Part(columns=share.output_columns),
            **dict.fromkeys(("gate", "up", "gate_bias", "up_bias"), mlp),
            "gate_up": Part(share.gate_up_rows),
            "down": Part(columns=share.inner),
            **dict.fromkeys(("expert_gate", "expert_up"), Part(gate)),
            "expert_down": Part(down, share.expert_inner),
            **dict.fromkeys(("shared_gate", "shared_up"), Part((share.shared_inner,))),
            "shared_down": Part(columns=share.shared_inner),
            **dict.fromkeys(_WHOLE),
            **dict.fromkeys(_ADDED_ONCE),
        }
        latent = config.latent
        query_dim, value_dim = config.head_dim, config.head_dim
        if latent is not None:  # the heads' own products; all read one vector per token, which every rank keeps
            query_dim, value_dim = latent.query_dim, latent.value_dim
            self._rules |= {
                "kv_up": Part((_scaled(share.heads, latent.nope_dim + value_dim),)),
                "k_up": Part((_scaled(share.heads, latent.size),)),
                "v_up": Part((_scaled(share.heads, value_dim),)),
            }
        rows = {
            **dict.fromkeys(("embedding", "head"), config.vocab_size),
            **dict.fromkeys(("q", "q_bias", "q_up"), config.num_heads * query_dim),
            **dict.fromkeys(("k", "v", "k_bias", "v_bias"), config.num_kv_heads * config.head_dim),
            "qkv": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            **dict.fromkeys(("gate", "up"), config.intermediate_size),
            "gate_up": 2 * config.intermediate_size,
        }
        columns = {"output": config.num_heads * value_dim, "down": config.intermediate_size}
        self._lengths = {key: (0, length) for key, length in rows.items()}
        self._lengths |= {key: (-1, length) for key, length in columns.items()}

    def of(self, name: str) -> Part | None:
        """None: the whole tensor."""
        key = self._names.get(name, "")
        if key not in self._rules:
            raise Unsupported(
                f"tensor_parallel: tensor {name} of a {self._share.config.family} model has no rule for splitting it; "
                f"leave tensor_parallel at 1",
                where="tensor_parallel",
            )
        return self._rules[key]

    def check(self, name: str, shape: tuple[int, ...], source: str) -> None:
        """Raises UnknownModel where the split axis is not as long as the config says."""
        axis, length = self._lengths.get(self._names.get(name, ""), (0, 0))
        if length and shape[axis] != length:
            raise UnknownModel(f"{source}: tensor {name} is {list(shape)}, but its config asks for {length} of these")

    def key(self, name: str) -> str:
        """Ours for a tensor of the file, or ""."""
        return self._names.get(name, "")

    def is_added_once(self, name: str) -> bool:
        return self._names.get(name) in _ADDED_ONCE


_EXPERTS = ("expert_gate", "expert_up", "expert_down")
# Biases of products whose inputs are split: one rank adds them, the others add zeros.
_ADDED_ONCE = ("output_bias", "down_bias")
_WHOLE = (
    *("norm", "norm_bias", "positions", "attention_norm", "mlp_norm", "attention_norm_bias", "mlp_norm_bias"),
    *("attention_post_norm", "mlp_post_norm", "q_norm", "k_norm", "router", "router_bias", "shared_router"),
    *("q_down", "q_down_norm", "kv_down", "kv_down_norm"),
)


def _heads(config: ModelConfig, rank: int, size: int) -> tuple[range, range]:
    """The rank's query heads, and the key/value heads that they read."""
    num_kv = config.num_kv_heads
    if config.latent is not None:  # its heads share one vector per token; a config may count it once or for each head
        if size > config.num_heads:
            raise InvalidParams(
                f"tensor_parallel={size}: the model has {config.num_heads} query heads; at most as many ranks can "
                f"share them",
                where="tensor_parallel",
            )
        heads = even_parts(config.num_heads, size)[rank]
        return heads, heads if num_kv == config.num_heads else range(num_kv)
    group = config.num_heads // num_kv
    if size <= num_kv:
        kv_heads = even_parts(num_kv, size)[rank]
        return _scaled(kv_heads, group), kv_heads
    owners = [r * num_kv // size for r in range(size)]  # of each rank, its only key/value head
    kv_head = owners[rank]
    sharing = [r for r in range(size) if owners[r] == kv_head]
    if max(owners.count(head) for head in range(num_kv)) > group:
        raise InvalidParams(
            f"tensor_parallel={size}: the model has {config.num_heads} query heads, {group} for each of {num_kv} "
            f"key/value heads; at most {config.num_heads} ranks can share them",
            where="tensor_parallel",
        )
    part = even_parts(group, len(sharing))[sharing.index(rank)]
    return _moved(part, kv_head * group), range(kv_head, kv_head + 1)


def _pieces(what: str, count: int, piece_len: int, rank: int, size: int) -> range:
    """The rank's part of ``count`` in pieces of ``piece_len``; the last piece may be shorter."""
    if not count:
        return range(0)
    num_pieces = -(-count // piece_len)
    if num_pieces < size:
        raise InvalidParams(
            f"tensor_parallel={size}: the model has {count:,} {what}, {num_pieces} pieces of {piece_len}; "
            f"at most {num_pieces} ranks can share them"
            + ("; expert_parallel shares out whole experts" if what.endswith("an expert") else ""),
            where="tensor_parallel",
        )
    part = even_parts(num_pieces, size)[rank]
    return range(part.start * piece_len, min(part.stop * piece_len, count))


def _scaled(run: range, factor: int) -> range:
    return range(run.start * factor, run.stop * factor)


def _moved(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)
