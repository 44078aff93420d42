"""Trains an EAGLE-style head (Li et al., 2024) on a model's texts and features. Plain torch in float32.

The loss compares the head's next feature with the model's: cross-entropy of their token distributions, over the tokens
that are frequent in the corpus, and smooth L1 of the features. A second pass runs on the first pass's features, as the
head does when it drafts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ...protocol.errors import Unsupported
from ..layers.linear import as_float
from ..layers.norm import NoNorm
from ..layers.rotary import cos_sin_table
from ..models.names import TensorNames
from ..speculative import EagleShape
from ..weights.weight_file import open_weights
from .corpus import Corpus, CorpusText

if TYPE_CHECKING:
    from ..engine import EngineCore

_BATCH = 4  # windows of a step
_SECOND = 0.5  # weight of the second pass
_LIKENESS = 0.1  # weight of smooth L1


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """Results on held-out texts: how often the head's likeliest token is the model's, after the model's features
    (``first``) and after the head's own (``second``); ``known``: share of the model's tokens that the head has.
    """

    steps: int
    seconds: float
    first_loss: float
    last_loss: float
    first: float
    second: float
    known: float


class EagleModule(nn.Module):
    """The trainable form of ``runtime.speculative.eagle``; parameters have the names of the file."""

    cos_sin: Tensor  # [window, D]
    head: Tensor  # [N, C]

    def __init__(self, shape: EagleShape, *, eps: float, cos_sin: Tensor, head: Tensor, norm: Tensor) -> None:
        """``head`` [N, C] is the model's and stays fixed; ``norm`` [C] is the model's and is trained further."""
        super().__init__()
        self.shape, self.eps = shape, eps
        self.register_buffer("cos_sin", cos_sin[: shape.window], persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.weights = nn.ParameterDict()
        rng = torch.Generator().manual_seed(0)
        for name, size in shape.tensor_shapes(0).items():
            if name.startswith("head"):
                continue
            key = name.removesuffix(".weight")
            if len(size) == 1:
                weight = norm.clone() if key == "norm" else torch.ones(size)
            else:
                weight = torch.randn(size, generator=rng) * (0.5 / math.sqrt(size[1]))
            self.weights[key] = nn.Parameter(weight)
        with torch.no_grad():  # at the start the next feature is close to the last
            self.weights["feature"] += torch.eye(shape.hidden_size)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        """The next features [B, T, C] after ``features`` and the embeddings of the tokens that follow each."""
        w, shape = self.weights, self.shape
        residual = F.linear(features, w["feature"]) + F.linear(embedded, w["token"])
        x = _rms_norm(residual, w["attention_norm"], self.eps)
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        qkv = F.linear(x, w["qkv"]).unflatten(-1, (-1, dim)).transpose(1, 2)  # [B, H, T, D]
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        q, k = self._rotate(q), self._rotate(k)
        group = heads // kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        residual = residual + F.linear(x.transpose(1, 2).flatten(2), w["output"])
        x = _rms_norm(residual, w["mlp_norm"], self.eps)
        gate, up = F.linear(x, w["gate_up"]).chunk(2, dim=-1)
        residual = residual + F.linear(F.silu(gate) * up, w["down"])
        return _rms_norm(residual, w["norm"], self.eps)

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.cos_sin[: x.shape[2]].chunk(2, dim=-1)
        half = cos.shape[-1]
        first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.weight": weight.detach() for name, weight in self.weights.items()}


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def train_eagle(
    engine: EngineCore,
    corpus: Corpus,
    out: Path,
    *,
    minutes: float = 5.0,
    max_steps: int = 1_000_000,
    num_tokens: int = 4096,
    window: int = 256,
    learning_rate: float = 1e-3,
    progress: Callable[[str, int, int], None] | None = None,
) -> TrainingReport:
    """Train a head for ``engine``'s model, until ``minutes`` or ``max_steps`` have passed, and write it to ``out``.

    The head drafts the ``num_tokens`` most frequent tokens of the corpus and attends to the last ``window`` tokens. One
    text in ten is held out.
    """
    say = progress or (lambda what, done, total: None)
    config = engine.model.config
    if config.rotary != config.head_dim:
        raise Unsupported(
            f"training a draft head for a model whose rope rotates {config.rotary} of {config.head_dim} dimensions; it "
            "must rotate all"
        )
    shape = EagleShape(
        engine.tokenizer.vocab_hash,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        window,
    )
    kept = [text for i, text in enumerate(corpus.texts) if i % 10 != 9] or list(corpus.texts)
    held_out = [text for i, text in enumerate(corpus.texts) if i % 10 == 9] or kept
    token_ids = _frequent(kept, config.vocab_size, num_tokens)
    norm = engine.model.norm
    assert not isinstance(norm, NoNorm), "the engine has the whole model"
    module = EagleModule(
        shape,
        eps=config.rms_norm_eps,
        cos_sin=cos_sin_table(config, window),
        head=_head_weight(engine)[token_ids],
        norm=norm.weight.detach().float().cpu().clone(),
    )
    embedding = engine.model.embedding.weight.detach().cpu()
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    rng = torch.Generator().manual_seed(1)
    losses: list[float] = []
    start_s = time.monotonic()
    budget_s = 60.0 * minutes
    while len(losses) < max_steps and (spent_s := time.monotonic() - start_s) < budget_s:
        done = max(spent_s / budget_s, len(losses) / max_steps)
        rate = min(1.0, (len(losses) + 1) / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        loss = _loss(module, *_batch(kept, embedding, rng, window))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        say("seconds of training", min(round(time.monotonic() - start_s), round(budget_s)), round(budget_s))
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in module.tensors().items()}
    tensors["head.weight"] = module.head.to(torch.bfloat16).contiguous()
    tensors["token_ids"] = token_ids.to(torch.int32)
    save_file(tensors, out, metadata={name: str(value) for name, value in msgspec.to_builtins(shape).items()})
    first, second, known = _measure(module, held_out, embedding, token_ids, _head_weight(engine))
    tail = losses[-10:]
    return TrainingReport(
        len(losses), time.monotonic() - start_s, losses[0], sum(tail) / len(tail), first, second, known
    )


def _head_weight(engine: EngineCore) -> Tensor:
    """The head's weight in the model's file, float32 [V, C]."""
    file = open_weights(engine.model_path)
    name = "embedding" if file.config.tied_embeddings else "head"
    return as_float(file.tensor(TensorNames(file.config, file.format).of_model(name))).float().cpu()


def _frequent(texts: list[CorpusText], vocab_size: int, count: int) -> Tensor:
    """The ``count`` most frequent tokens, ascending; of equally frequent tokens the lower ids."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text.token_ids, minlength=vocab_size)
    return torch.sort(torch.sort(counts, descending=True, stable=True).indices[:count]).values


def _batch(
    texts: list[CorpusText], embedding: Tensor, rng: torch.Generator, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Features [B, T + 1, C], embeddings of the next tokens [B, T, C], and which positions are not padding [B, T]."""
    parts = []
    for i in torch.randint(len(texts), (_BATCH,), generator=rng).tolist():
        text = texts[i]
        begin = max(text.first - 1, 0)
        room = len(text.token_ids) - begin - window - 1
        if room > 0:
            begin += int(torch.randint(room + 1, (1,), generator=rng))
        parts.append((text.features[begin : begin + window + 1].float(), text.token_ids[begin : begin + window + 1]))
    longest = max(len(ids) for _, ids in parts)
    features = torch.stack([F.pad(part, (0, 0, 0, longest - len(part))) for part, _ in parts])
    ids = torch.stack([F.pad(part, (0, longest - len(part))) for _, part in parts])
    counts = torch.stack([torch.arange(longest - 1) < len(part) - 1 for _, part in parts])
    return features, embedding[ids[:, 1:]].float(), counts


def _loss(module: EagleModule, features: Tensor, embedded: Tensor, counts: Tensor) -> Tensor:
    wanted, head = features[:, 1:], module.head
    with torch.no_grad():
        chances = F.linear(wanted, head).softmax(-1)
    noisy = features[:, :-1] * (1.0 + 0.05 * torch.randn_like(features[:, :-1]))
    found = module(noisy, embedded)
    total = _distance(found, wanted, chances, head, counts)
    # The second pass: the head's feature of the previous token in place of the model's.
    own = torch.cat((features[:, :1], found[:, :-1]), dim=1)
    return total + _SECOND * _distance(module(own, embedded), wanted, chances, head, counts)


def _distance(found: Tensor, wanted: Tensor, chances: Tensor, head: Tensor, counts: Tensor) -> Tensor:
    surprise = -(chances * F.linear(found, head).log_softmax(-1)).sum(-1)
    likeness = F.smooth_l1_loss(found, wanted, reduction="none").mean(-1)
    return ((surprise + _LIKENESS * likeness) * counts).sum() / counts.sum()


@torch.inference_mode()
def _measure(
    module: EagleModule, texts: list[CorpusText], embedding: Tensor, token_ids: Tensor, head: Tensor
) -> tuple[float, float, float]:
    right = second = known = count = 0
    for text in texts[:40]:
        begin = max(text.first - 1, 0)
        features = text.features[begin : begin + module.shape.window + 1].float()[None]
        embedded = embedding[text.token_ids[begin + 1 : begin + features.shape[1]]].float()[None]
        wanted = F.linear(features[0, 1:], head).argmax(-1)
        found = module(features[:, :-1], embedded)
        again = module(torch.cat((features[:, :1], found[:, :-1]), dim=1), embedded)
        right += int((token_ids[F.linear(found[0], module.head).argmax(-1)] == wanted).sum())
        second += int((token_ids[F.linear(again[0], module.head).argmax(-1)] == wanted).sum())
        known += int(torch.isin(wanted, token_ids).sum())
        count += len(wanted)
    return right / count, second / count, known / count
