"""What the products of each layer read on a text, layer after layer: each layer runs once on the whole text."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ...kernels.linear import Columns, PackedLinear
from ..layers.attention import Attention
from ..layers.batch import ForwardBatch
from ..layers.linear import Linear
from ..layers.mlp import MLP
from .quality import CHUNK, TextReader

_ROWS = 128  # inputs of a product that are kept, to compare its results


@dataclass(slots=True)
class Inputs:
    """The inputs of one product: their sizes and products summed, and some of them."""

    count: int = 0
    sizes: torch.Tensor | None = None  # float32 [K]: sum of |x|
    products: torch.Tensor | None = None  # float32 [K, K]: sum of x x^T
    rows: list[torch.Tensor] = field(default_factory=list)

    def see(self, x: torch.Tensor) -> None:  # [T, K]
        x = x.float()
        sizes = x.abs().sum(dim=0)
        self.sizes = sizes if self.sizes is None else self.sizes + sizes
        if self.products is None:
            self.products = torch.zeros(x.shape[1], x.shape[1])
        self.products.addmm_(x.T, x)
        self.count += len(x)
        have = sum(map(len, self.rows))
        if have < _ROWS:
            self.rows.append(x[:: max(1, len(x) // 32)][: _ROWS - have].clone())

    @property
    def mean_size(self) -> torch.Tensor:
        assert self.sizes is not None
        return self.sizes / self.count

    def scaled(self, scales: torch.Tensor) -> torch.Tensor:
        """The sum of x x^T of inputs that are divided by ``scales`` [K]."""
        assert self.products is not None
        return self.products / (scales.unsqueeze(1) * scales)


class _Watched(PackedLinear):
    """A product that shows its inputs."""

    def __init__(self, product: PackedLinear, inputs: Inputs) -> None:
        vars(self).update(vars(product))
        self._inputs = inputs

    def __call__(self, x: torch.Tensor | Columns) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        self._inputs.see(x)
        return super().__call__(x)


@dataclass(slots=True)
class _Window:
    """A piece of the text, with an empty context, between two layers; ``added`` is to be added to ``residual``."""

    batch: ForwardBatch
    x: torch.Tensor
    residual: torch.Tensor
    added: torch.Tensor | None = None


class LayerInputs:
    """Runs a model on ``tokens``, int64 [N], one layer at a time. It holds the text's vectors between two layers."""

    def __init__(self, reader: TextReader, tokens: torch.Tensor) -> None:
        self._reader = reader
        self._next = 0
        with torch.inference_mode():
            self._windows = list(self._embedded(tokens))

    def of_next_layer(self) -> dict[str, Inputs]:
        """The inputs of its products: ``qkv``, ``output``, ``gate_up`` and ``down``."""
        layer = self._reader.model.layers[self._next]
        self._next += 1
        assert isinstance(layer.mlp, MLP) and isinstance(layer.attention, Attention)
        attention, mlp = layer.attention, layer.mlp
        linears = {"qkv": attention.qkv, "output": attention.output, "gate_up": mlp.gate_up, "down": mlp.down}
        found = {name: Inputs() for name in linears}
        parts = {name: linear.parts for name, linear in linears.items()}
        try:
            for name, linear in linears.items():
                _watch(linear, found[name])
            with torch.inference_mode():
                for window in self._windows:
                    x, total = layer.attention_norm(window.x, window.added)
                    window.residual = window.residual if window.added is None else total
                    x = attention(x, window.batch, self._reader.kv, layer.cos_sin)
                    window.x, window.added = layer.feed_forward(x, window.residual, None)
        finally:
            for name, linear in linears.items():
                linear.parts = parts[name]
        return found

    def _embedded(self, tokens: torch.Tensor) -> Iterator[_Window]:
        reader = self._reader
        for piece in tokens.split(min(reader.model.max_positions, 2 * CHUNK)):
            n = len(piece)
            batch = ForwardBatch(
                token_ids=piece,
                positions=torch.arange(n),
                out_slots=reader.slots[:n],
                row_ids=torch.zeros(1, dtype=torch.int32),
                query_starts=torch.tensor([0, n], dtype=torch.int32),
                kv_lens=torch.tensor([n], dtype=torch.int32),
                slot_table=reader.table,
                logits_rows=torch.arange(n),
            )
            x = reader.model.embed(batch.token_ids, batch.positions)
            yield _Window(batch, x, x.float())


def _watch(linear: Linear, inputs: Inputs) -> None:
    """Only its first part shows its inputs: all parts read the same ones."""
    first, *others = linear.parts
    assert not others, "products of a model in float32 have one part"
    linear.parts = (_Watched(first, inputs),)
