"""Gives a model's layers the low-rank adapters of an engine. The weights stay unchanged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ...protocol.errors import InvalidParams, UnknownModel, Unsupported
from ..layers.adapters import LowRank
from ..layers.attention import Attention
from ..layers.latent_attention import LatentAttention, query_order, vector_order
from ..layers.linear import Linear
from ..layers.mlp import MLP
from ..weights.adapter_folder import LowRankPair, read_adapter
from ..weights.model_config import ModelConfig
from .decoder import DecoderLayer, Model

Adapter = tuple[str, dict[tuple[int, str], LowRankPair]]  # its path, what it adds
Place = tuple[Linear, dict[str, int], int]  # a product, its targets and their rows, its inputs


def with_adapters(
    model: Model, adapters: Mapping[str, str], *, cut: Callable[[Adapter], Adapter] | None = None
) -> Model:
    """``adapters``: name -> PEFT folder. A sequence refers to an adapter by its index in ``Model.adapters``.

    ``cut`` gives the part of an adapter that belongs to ``model``, where that is one rank's share of a model.
    """
    for name, path in adapters.items():
        if not name or not path:
            raise InvalidParams(f"adapter {name!r}={path!r}: give a name and a folder", where="adapters")
    read: list[Adapter] = [(path, read_adapter(Path(path))) for path in adapters.values()]
    if cut is not None:
        read = [cut(adapter) for adapter in read]
    for linear, found in _adapted(model, read):
        linear.adapters = found
    return replace(model, adapters=tuple(adapters))


def with_adapter_at(model: Model, index: int, name: str, path: str) -> Model:
    """``model`` with the adapter in folder ``path`` at ``index`` of its adapters, which is free or one past the end.

    The products are changed in place, between two steps. An empty ``name`` frees the index. Raises as
    ``with_adapters``; then nothing has changed.
    """
    names = [*model.adapters, *[""] * (index + 1 - len(model.adapters))]
    names[index] = name
    read = (path, read_adapter(Path(path)) if name else {})
    changed = [
        (linear, _with_index(linear.adapters, found, index, len(names), model))
        for linear, found in _adapted(model, [read])
    ]
    for linear, found in changed:
        linear.adapters = found
    return replace(model, adapters=tuple(names))


def _with_index(
    old: Sequence[LowRank], new: Sequence[LowRank], index: int, count: int, model: Model
) -> tuple[LowRank, ...]:
    """The stacks ``old``, for ``count`` adapters, with those of ``new``, which are of one adapter, at ``index``."""
    olds, news = ({low_rank.columns.start: low_rank for low_rank in some} for some in (old, new))
    found = []
    for start in sorted({*olds, *news}):
        before, added = olds.get(start), news.get(start)
        parts = [part for part in (before, added) if part is not None]
        rank = max(part.down.shape[1] for part in parts)
        down = torch.zeros(count, rank, parts[0].down.shape[2], dtype=model.dtype, device=model.device)
        up = torch.zeros(count, parts[0].up.shape[1], rank, dtype=model.dtype, device=model.device)
        if before is not None:
            down[: len(before.down), : before.down.shape[1]] = before.down
            up[: len(before.up), :, : before.up.shape[2]] = before.up
            up[index] = 0
        if added is not None:
            down[index, : added.down.shape[1]] = added.down[0]
            up[index, :, : added.up.shape[2]] = added.up[0]
        if bool(up.any()):
            found.append(LowRank(parts[0].columns, down, up))
    return tuple(found)


def _adapted(model: Model, adapters: Sequence[Adapter]) -> list[tuple[Linear, tuple[LowRank, ...]]]:
    """Every product that can be adapted, and what ``adapters`` add to it. Raises UnknownModel and Unsupported."""
    for path, added in adapters:
        last = model.first_layer + len(model.layers) - 1
        beyond = [layer for layer, _ in added if layer > last]
        if beyond:
            raise UnknownModel(f"adapter {path} has layer {max(beyond)}, but the model's last is {last}")
    layers = enumerate(model.layers, model.first_layer)
    return [found for i, layer in layers for found in _adapted_layer(layer, i, model, adapters)]


def _adapted_layer(
    layer: DecoderLayer, i: int, model: Model, adapters: Sequence[Adapter]
) -> list[tuple[Linear, tuple[LowRank, ...]]]:
    config = model.config
    places = _attention_places(layer.attention, config)
    if isinstance(layer.mlp, MLP):
        inner = config.intermediate_size
        gate_up = {"gate_up_proj": 2 * inner} if config.fused_gate_up else {"gate_proj": inner, "up_proj": inner}
        places.append((layer.mlp.gate_up, gate_up, config.hidden_size))
        places.append((layer.mlp.down, {"down_proj": config.hidden_size}, inner))
    if config.layer_norm:  # GPT-2 and GPT-NeoX, whose weights have other names
        places = []
    known = [target for _, targets, _ in places for target in targets]
    for path, added in adapters:
        others = sorted(target for at, target in added if at == i and target not in known)
        if others:
            raise Unsupported(
                f"adapter {path}: {others[0]} of layer {i} is not adapted here; of a {config.family} model "
                f"{', '.join(known) or 'nothing'} can be"
            )
    return [
        (linear, tuple(_low_ranks(linear, targets, width, i, model, adapters))) for linear, targets, width in places
    ]


def _attention_places(attention: Attention | LatentAttention, config: ModelConfig) -> list[Place]:
    hidden = config.hidden_size
    if isinstance(attention, Attention):
        q_len, kv_len = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": q_len, "k_proj": kv_len, "v_proj": kv_len}
        return [
            (attention.qkv, {"qkv_proj": q_len + 2 * kv_len} if config.fused_qkv else qkv, hidden),
            (attention.output, {"o_proj": hidden}, q_len),
        ]
    sizes, query = attention.sizes, attention.query  # ``kv_b_proj`` is no product of its own here
    queries = config.num_heads * sizes.query_dim
    places: list[Place] = [
        (attention.compress, {"kv_a_proj_with_mqa": sizes.slot_dim}, hidden),
        (attention.output, {"o_proj": hidden}, config.num_heads * sizes.value_dim),
    ]
    if isinstance(query, Linear):
        return [(query, {"q_proj": queries}, hidden), *places]
    down = (query.down, {"q_a_proj": sizes.query_size}, hidden)
    return [down, (query.up, {"q_b_proj": queries}, sizes.query_size), *places]


def _row_order(config: ModelConfig, target: str) -> torch.Tensor | slice:
    """Where in the adapter each row of a layer's product lies."""
    if config.latent is None:
        return slice(None)
    if target == "kv_a_proj_with_mqa":
        return vector_order(config.latent)
    return query_order(config.latent, config.num_heads) if target in ("q_proj", "q_b_proj") else slice(None)


def _low_ranks(
    linear: Linear, targets: dict[str, int], width: int, i: int, model: Model, adapters: Sequence[Adapter]
) -> list[LowRank]:
    found, start = [], 0
    for target, num in targets.items():
        pairs = [(a, path, added[i, target]) for a, (path, added) in enumerate(adapters) if (i, target) in added]
        columns = slice(start, start + num)
        start += num
        if not pairs:
            continue
        rank = max(down.shape[0] for _, _, (down, _) in pairs)
        down = torch.zeros(len(adapters), rank, width, dtype=model.dtype)
        up = torch.zeros(len(adapters), num, rank, dtype=model.dtype)
        for a, path, (a_down, a_up) in pairs:
            if a_down.shape[1] != width or a_up.shape[0] != num:
                raise UnknownModel(
                    f"adapter {path}: {target} of layer {i} is {a_up.shape[0]} x {a_down.shape[1]}, "
                    f"but the model's is {num} x {width}; it was made for another model"
                )
            down[a, : len(a_down)] = a_down
            up[a, :, : len(a_down)] = a_up[_row_order(model.config, target)] * linear.gain
        found.append(LowRank(columns, down.to(model.device), up.to(model.device)))
    return found
