"""The predicted time of one step, op by op, from a model's shape and a machine's rates."""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import Hardware
from .shapes import WEIGHT_BYTES, ModelShape

KERNELS_A_LAYER = 8  # four products, two norms, rope with the KV write, attention, activation; one is fused
SUM_BYTES = 2  # of a number in a sum between ranks
SMALL_KERNELS = 4  # of them, without products and attention


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds by part, as in ``phloem bench --profile``."""

    linear: float
    attention: float
    small_ops: float
    head: float
    host: float
    collectives: float = 0.0

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.small_ops + self.head + self.host + self.collectives


def step_time(
    shape: ModelShape,
    hardware: Hardware,
    *,
    rows: float,
    context: float,
    prefill: float = 0.0,
    prefill_context: float = 0.0,
    tensor_parallel: int = 1,
) -> StepTime:
    """A step in which ``rows`` sequences decode one token each, with ``context`` tokens before it on average, beside
    ``prefill`` tokens of prompts with ``prefill_context`` tokens before them on average. Counts may be fractions.

    With ``tensor_parallel`` ranks each has its share of the work, and two sums a layer and one of the embedding join
    the results.
    """
    whole, shape = shape, shape.share(tensor_parallel)
    tokens = rows + prefill
    # A prompt needs logits only for its last token, which is left out.
    head = hardware.product_s(
        shape.vocab_size,
        shape.hidden,
        max(rows, 1.0),
        bits=shape.head_bits,
        weight_bytes=WEIGHT_BYTES[shape.head_bits],
    )
    attention = (
        hardware.attention_call_s
        + hardware.attention_row_s * rows
        + _attention_s(shape, hardware, rows, context, hardware.score_rate)
        + _attention_s(shape, hardware, prefill, prefill_context, hardware.prefill_score_rate, queries=64.0)
    )
    return StepTime(
        linear=shape.num_layers * _products_s(shape, hardware, tokens),
        attention=shape.num_layers * attention,
        small_ops=shape.num_layers * _small_ops_s(shape, hardware, tokens),
        head=head,
        host=hardware.host_step_s
        + rows * hardware.host_row_s
        + (rows * whole.vocab_size / hardware.logit_rate if hardware.logit_rate else 0.0),
        collectives=(2 * shape.num_layers + 1) * hardware.sum_s(tokens * shape.hidden * SUM_BYTES, tensor_parallel),
    )


def _products_s(shape: ModelShape, hardware: Hardware, tokens: float) -> float:
    """Seconds of one layer's products. Its weights may be a mix of 8 bits and the model's bits."""
    shares = ((shape.weight_bits, 1.0 - shape.eight_bit_share), (8, shape.eight_bit_share))
    dense = shape.products[:2] if shape.num_experts else shape.products
    products_s = sum(
        share * hardware.product_s(outputs, inputs, tokens, bits=bits, weight_bytes=WEIGHT_BYTES[bits])
        for outputs, inputs in dense
        for bits, share in shares
        if share
    )
    if shape.num_experts and tokens:
        read = shape.experts_read(tokens)
        each = tokens * shape.experts_per_token / read  # tokens of one expert
        products_s += hardware.product_s(shape.num_experts, shape.hidden, tokens, bits=16, weight_bytes=2.0)
        products_s += read * sum(
            hardware.product_s(outputs, inputs, each, bits=shape.weight_bits, weight_bytes=shape.layer_weight_bytes)
            for outputs, inputs in shape.products[2:]
        )
    return products_s


def _attention_s(
    shape: ModelShape, hardware: Hardware, tokens: float, context: float, score_rate: float, *, queries: float = 1.0
) -> float:
    """Seconds of one layer's attention over the context; ``queries`` tokens read the context together."""
    numbers = 2 * tokens * context * shape.num_kv_heads * shape.head_dim / queries
    products = 2 * tokens * context * shape.num_heads * shape.head_dim
    if hardware.key_rate:
        return numbers / hardware.key_rate + products / score_rate
    return max(numbers * shape.kv_bytes / hardware.read_rate, 2 * products / hardware.product_rate)


def _small_ops_s(shape: ModelShape, hardware: Hardware, tokens: float) -> float:
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    passed, gated = tokens * (2 * shape.hidden + heads), tokens * shape.inner
    if hardware.element_rate:
        numbers_s = passed / hardware.element_rate + 2 * gated / hardware.gate_rate
    else:
        numbers_s = 4 * (passed + 2 * gated) / hardware.read_rate
    # A measured machine has the calls of products and attention in their own figures.
    return numbers_s + (SMALL_KERNELS if hardware.product_calls else KERNELS_A_LAYER) * hardware.launch_s
