"""One rank's share of a model: which layers and which part of each it reads, and the collectives that join them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch

from ...protocol.errors import InvalidParams, UnknownModel
from ..layers.attention import Attention
from ..layers.latent_attention import LatentAttention
from ..layers.mlp import MLP
from ..layers.moe import MoE
from ..models import Model
from ..models.adapters import Adapter
from ..models.decoder import DecoderLayer
from ..models.loading import LayerRun
from ..weights.adapter_folder import LowRankPair
from ..weights.model_config import ModelConfig
from ..weights.weight_file import WeightFile
from .experts import SplitExperts
from .group import Group
from .mesh import Mesh, stages_of
from .pipeline import PipelineStage
from .sequence import SequenceRanks, SpreadKeys
from .sharding import Share, SharedFile, even_parts, piece_len_of, share_of
from .tensor import RowLinear, SplitEmbedding, SplitHead, SplitMoE


class RankSplit:
    """Implements ``models.loading.Split`` for this rank of ``group``, which has all ranks of the mesh.

    ``source`` is the file that the rank read.
    """

    def __init__(self, group: Group, mesh: Mesh, *, expert_copies: int = 0) -> None:
        """``expert_copies``: spare places for other ranks' experts in each mixture."""
        assert group.size == mesh.size
        self.group, self.mesh, self._expert_copies = group, mesh, expert_copies
        self.stage = mesh.stage_of(group.rank)
        self._tensor = group.part(mesh.tensor_ranks(group.rank))  # the ranks that share this one's layers
        self._sequence = group.part(mesh.sequence_ranks(group.rank))  # those that have the other slots
        self.source: SharedFile | None = None
        self._share: Share | None = None
        self._piece_len = 0

    @property
    def share(self) -> Share:
        assert self._share is not None, "no file has been read"
        return self._share

    def file(self, file: WeightFile) -> WeightFile:
        self._piece_len = piece_len_of(file)
        self._share = self._share_of(file.config, self._tensor.rank)
        self._refuse_copies(file.config)
        own = {"head"} if self.run(file.config).has_embedding else {"head", "embedding"}  # a tied head is an embedding
        self.source = SharedFile(file, self._share, not_copied=own if self.mesh.sequence > 1 else None)
        return self.source

    def _share_of(self, config: ModelConfig, tensor_rank: int) -> Share:
        size, parts = self.mesh.tensor, self.mesh.expert
        return share_of(config, rank=tensor_rank, size=size, piece_len=self._piece_len, expert_parts=parts)

    def _refuse_copies(self, config: ModelConfig) -> None:
        """Raises InvalidParams for more spare places than there are experts to copy."""
        parts = even_parts(config.num_experts, self.mesh.expert)
        most = config.num_experts - len(parts[0])  # the first part has most experts itself
        if self._expert_copies > most:
            raise InvalidParams(
                f"expert_copies={self._expert_copies}: of {config.num_experts} experts a part of the ranks has "
                f"{len(parts[0])} itself, so it can have copies of {most} at most",
                where="expert_copies",
            )

    def run(self, config: ModelConfig) -> LayerRun:
        layers = self.mesh.layers_of(self.share.config, self.group.rank)  # ``config`` may be of a share
        return replace(layers, experts=self.share.experts, spare_experts=self._expert_copies)

    def adapter(self, adapter: Adapter) -> Adapter:
        path, added = adapter
        layers = self.run(self.share.config).layers
        last = self.share.config.num_layers - 1
        beyond = [layer for layer, _ in added if layer > last]
        if beyond:
            raise UnknownModel(f"adapter {path} has layer {max(beyond)}, but the model's last is {last}")
        return path, {
            (layer, target): self._pair(path, layer, target, pair)
            for (layer, target), pair in added.items()
            if layer in layers
        }

    def _pair(self, path: str, layer: int, target: str, pair: LowRankPair) -> LowRankPair:
        share, config, (down, up) = self.share, self.share.config, pair
        if share.size == 1:
            return pair
        q_len, kv_len = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = config.intermediate_size
        rows, num_rows = {
            "q_proj": ((share.query_rows,), q_len),
            **dict.fromkeys(("k_proj", "v_proj"), ((share.kv_rows,), kv_len)),
            "qkv_proj": (share.qkv_rows, q_len + 2 * kv_len),
            **dict.fromkeys(("gate_proj", "up_proj"), ((share.inner,), inner)),
            "gate_up_proj": (share.gate_up_rows, 2 * inner),
        }.get(target, ((range(len(up)),), config.hidden_size))
        columns, width = {"o_proj": (share.output_columns, q_len), "down_proj": (share.inner, inner)}.get(
            target, (range(down.shape[1]), config.hidden_size)
        )
        if len(up) != num_rows or down.shape[1] != width:
            raise UnknownModel(
                f"adapter {path}: {target} of layer {layer} is {len(up)} x {down.shape[1]}, "
                f"but the model's is {num_rows} x {width}; it was made for another model"
            )
        return down[:, columns.start : columns.stop], torch.cat([up[run.start : run.stop] for run in rows])

    def joined(self, model: Model) -> Model:
        config, mesh = self.share.config, self.mesh
        run = self.run(config)
        shares = [self._share_of(config, rank) for rank in range(mesh.tensor)]
        holders = [(rank, self._share_of(config, mesh.tensor_rank_of(rank)).vocab) for rank in mesh.head_ranks()]
        embedding = model.embedding
        if self._tensor.size > 1 and run.has_embedding:
            embedding = SplitEmbedding(embedding, self.share.vocab, self._tensor)
        return replace(
            model,
            config=msgspec.structs.replace(model.config, vocab_size=config.vocab_size),
            embedding=embedding,
            layers=tuple(self._layer(layer) for layer in model.layers),
            head=SplitHead(model.head, self.group, holders, vocab_size=config.vocab_size, device=model.device),
            has_tapes=mesh.pipeline == mesh.sequence == mesh.expert == 1,
            agree=self._agree,
            stages=tuple(stages_of(config, mesh.pipeline)),
            is_even=len({(len(share.heads), len(share.kv_heads)) for share in shares}) == 1,
            stage=self._stage(config, model.device) if mesh.pipeline > 1 else None,
            sequence=self._sequence_ranks(model) if mesh.sequence > 1 else None,
        )

    def _agree(self, is_so: bool) -> bool:
        return all(bool(one) for one in self._tensor.gather(torch.tensor([is_so])))

    def _sequence_ranks(self, model: Model) -> SequenceRanks:
        for layer in model.layers:
            layer.attention.keys = SpreadKeys(self._sequence)
        return SequenceRanks(self._sequence, frozenset(layer.attention.window for layer in model.layers))

    def _stage(self, config: ModelConfig, device: torch.device) -> PipelineStage:
        rank, step, count = self.group.rank, self.mesh.stage_size, self.mesh.pipeline
        return PipelineStage(
            self.group,
            num_stages=count,
            before=rank - step if self.stage > 0 else None,
            after=rank + step if self.stage < count - 1 else None,
            width=config.hidden_size,
            device=device,
        )

    def _layer(self, layer: DecoderLayer) -> DecoderLayer:
        if self._tensor.size == 1:
            return layer
        assert isinstance(layer.attention, Attention | LatentAttention)
        layer.attention.output = RowLinear(layer.attention.output, self._tensor)
        if isinstance(layer.mlp, MLP):
            layer.mlp.down = RowLinear(layer.mlp.down, self._tensor)
            return layer
        assert isinstance(layer.mlp, MoE)
        if self.mesh.expert == 1:
            return replace(layer, mlp=SplitMoE(layer.mlp, self._tensor))
        held = [self._share_of(self.share.config, rank).experts for rank in range(self._tensor.size)]
        return replace(layer, mlp=SplitExperts(layer.mlp, self._tensor, held, num_spare=self._expert_copies))
