"""Gives a model's layers the low-rank adapters of an engine. The weights stay unchanged."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ...kernels import adapter_tables
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


def load_adapters(
    model: Model, adapters: Mapping[str, str], *, cut: Callable[[Adapter], Adapter] | None = None
) -> None:
    """``adapters``: name -> PEFT folder. A sequence refers to an adapter by its number in ``Model.adapters``.

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
    model.adapters.names[:] = adapters


def put_adapter(model: Model, number: int, name: str, path: str) -> None:
    """The model has the adapter in folder ``path`` at ``number``, which is free or one past the last. Call it between
    two steps. An empty ``name`` frees the number.

    An adapter that fits is written into the tables where they lie. Otherwise tables are made anew, and
    ``AdapterNames.num_moves`` counts that. Without any adapter there are no tables. Raises as ``load_adapters``; then
    nothing has changed.
    """
    names = [*model.adapters.names, *[""] * (number + 1 - len(model.adapters))]
    names[number] = name
    read = (path, read_adapter(Path(path)) if name else {})
    if not any(names):
        names.clear()
    moved = len(names) != len(model.adapters)
    for linear, found in _adapted(model, [read]):
        tables = _with_number(linear.adapters, found, number, len(names), model)
        moved = moved or list(map(id, tables)) != list(map(id, linear.adapters))
        linear.adapters = tables
    model.adapters.names[:] = names
    model.adapters.num_moves += moved


def _with_number(
    old: Sequence[LowRank], new: Sequence[LowRank], number: int, count: int, model: Model
) -> tuple[LowRank, ...]:
    """The tables ``old``, for ``count`` adapters, with those of ``new``, which are of one adapter, at ``number``."""
    if not count:
        return ()
    olds, news = ({low_rank.columns.start: low_rank for low_rank in some} for some in (old, new))
    found = []
    for start in sorted({*olds, *news}):
        before, added = olds.get(start), news.get(start)
        rank = 0 if added is None else added.down.shape[1]
        if before is None or len(before.down) < count or before.down.shape[1] < rank:
            before = _enlarged(before, added, count, model)
        before.down[number], before.up[number] = 0, 0
        if added is not None:
            before.down[number, :rank] = added.down[0]
            before.up[number, :, :rank] = added.up[0]
        found.append(before)
    return tuple(found)


def _enlarged(before: LowRank | None, added: LowRank | None, count: int, model: Model) -> LowRank:
    """Tables of ``count`` adapters that hold those of ``before`` and have the rank of ``added`` too."""
    parts = [part for part in (before, added) if part is not None]
    rank = max(part.down.shape[1] for part in parts)
    made = _tables(parts[0].columns, count, rank, parts[0].down.shape[2], model)
    if before is not None:
        made.down[: len(before.down), : before.down.shape[1]] = before.down
        made.up[: len(before.up), :, : before.up.shape[2]] = before.up
    return made


def _tables(columns: slice, count: int, rank: int, width: int, model: Model) -> LowRank:
    num_outputs = columns.stop - columns.start
    down, up = adapter_tables(count, rank, width=width, num_outputs=num_outputs, dtype=model.dtype, device=model.device)
    return LowRank(columns, down, up)


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
        made = _tables(columns, len(adapters), rank, width, model)
        for a, path, (a_down, a_up) in pairs:
            if a_down.shape[1] != width or a_up.shape[0] != num:
                raise UnknownModel(
                    f"adapter {path}: {target} of layer {i} is {a_up.shape[0]} x {a_down.shape[1]}, "
                    f"but the model's is {num} x {width}; it was made for another model"
                )
            made.down[a, : len(a_down)] = a_down
            made.up[a, :, : len(a_down)] = a_up[_row_order(model.config, target)] * linear.gain
        found.append(made)
    return found
