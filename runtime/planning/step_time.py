"""The predicted time of one step, op by op, from a model's shape and a machine's rates."""

from __future__ import annotations

from dataclasses import dataclass

from ..parallel.sizes import READ_TOKENS, SUM_BY_PARTS, num_micro_steps
from .hardware import Hardware
from .shapes import WEIGHT_BYTES, ModelShape

KERNELS_A_LAYER = 8  # four products, two norms, rope with the KV write, attention, activation; one is fused
SUM_BYTES = 2  # of a number in a sum between ranks
RESIDUAL_BYTES = 4  # of a number that a stage sends to the next
SMALL_KERNELS = 4  # of them, without products and attention


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds by part, as in ``phloem bench --profile``. ``num_collectives`` and ``sent_bytes`` are of one rank.
    ``images``: of encoding images meanwhile, on the same device.
    """

    linear: float
    attention: float
    small_ops: float
    head: float
    host: float
    collectives: float = 0.0
    num_collectives: int = 0
    sent_bytes: float = 0.0
    images: float = 0.0

    @property
    def total(self) -> float:
        parts = self.linear + self.attention + self.small_ops + self.head + self.host
        return parts + self.collectives + self.images


def step_time(
    shape: ModelShape,
    hardware: Hardware,
    *,
    rows: float,
    context: float,
    prefill: float = 0.0,
    prefill_context: float = 0.0,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
) -> StepTime:
    """A step in which ``rows`` sequences decode one token each, with ``context`` tokens before it on average, beside
    ``prefill`` tokens of prompts with ``prefill_context`` tokens before them on average. Counts may be fractions.

    With ``tensor_parallel`` ranks each has its share of the work, and two sums a layer and one of the embedding join
    the results. With ``pipeline_parallel`` stages the layers are run in turns of a micro-step each. Each of
    ``expert_parallel`` parts of the ranks has some of the experts.
    """
    whole, shape = shape, shape.share(tensor_parallel, stages=pipeline_parallel, expert_parts=expert_parallel)
    tokens = rows + prefill
    micro_steps = num_micro_steps(pipeline_parallel, tokens, read_tokens=_read_tokens(whole, hardware))
    turns = micro_steps + pipeline_parallel - 1
    all_rows, rows, prefill, tokens = rows, rows / micro_steps, prefill / micro_steps, tokens / micro_steps
    layers = turns * shape.num_layers
    # A prompt needs logits only for its last token, which is left out.
    head = hardware.product_s(
        shape.vocab_size,
        shape.hidden,
        max(all_rows, 1.0),
        bits=shape.head_bits,
        weight_bytes=WEIGHT_BYTES[shape.head_bits],
    )
    attention = (
        hardware.attention_call_s
        + hardware.attention_row_s * rows
        + _attention_s(shape, hardware, rows, context, hardware.score_rate)
        + _attention_s(shape, hardware, prefill, prefill_context, hardware.prefill_score_rate, queries=64.0)
    )
    sums, exchanges = _joins(shape, tokens, tensor_parallel, expert_parallel)
    sum_bytes = tokens * shape.hidden * SUM_BYTES
    part = (tensor_parallel - 1) / tensor_parallel  # of a tensor that one rank sends when all get parts of it
    exchange_bytes = part * sum_bytes * (1 + _chosen_share(whole, expert_parallel))
    stage_bytes = tokens * shape.hidden * RESIDUAL_BYTES if pipeline_parallel > 1 else 0.0
    collectives = turns * (sums * hardware.sum_s(sum_bytes, tensor_parallel))
    if exchanges:
        collectives += turns * exchanges * (2 * hardware.collective_s + exchange_bytes / hardware.link_rate)
    if pipeline_parallel > 1:
        collectives += turns * hardware.send_s(stage_bytes)
    return StepTime(
        linear=layers * _products_s(shape, hardware, tokens),
        attention=layers * attention,
        small_ops=layers * _small_ops_s(shape, hardware, tokens),
        head=head,
        host=hardware.host_step_s
        + all_rows * hardware.host_row_s
        + (all_rows * whole.vocab_size / hardware.logit_rate if hardware.logit_rate else 0.0),
        collectives=collectives,
        num_collectives=micro_steps * (sums + 2 * exchanges + (pipeline_parallel > 1)),
        sent_bytes=micro_steps * (sums * 2 * part * sum_bytes + exchanges * exchange_bytes + stage_bytes),
    )


def _read_tokens(shape: ModelShape, hardware: Hardware) -> float:
    """For how many tokens products take as long as for one."""
    if hardware.curves:
        return READ_TOKENS
    each = hardware.product_rate * shape.layer_weight_bytes / (2 * hardware.read_rate)
    return each * shape.num_experts / shape.experts_per_token if shape.num_experts else each


def _joins(shape: ModelShape, tokens: float, ranks: int, expert_parts: int) -> tuple[int, int]:
    """How often ranks join a micro-step's results by a sum, and how often by an exchange of experts' results."""
    if ranks == 1:
        return 0, 0
    if expert_parts > 1 and tokens * shape.hidden >= SUM_BY_PARTS:
        return shape.num_layers + 1, shape.num_layers
    return 2 * shape.num_layers + 1, 0


def _chosen_share(whole: ModelShape, expert_parts: int) -> float:
    """The share of tokens that take an expert of one part, if all are equally likely."""
    return 1 - (1 - 1 / expert_parts) ** whole.experts_per_token if whole.num_experts else 0.0


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
        held = (shape.experts_held or shape.num_experts) / shape.num_experts
        each = tokens * shape.experts_per_token * held / read  # tokens of one expert
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
