"""The predicted time of one step, op by op, from a model's shape and a machine's rates."""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.errors import InvalidParams
from ..parallel.sizes import GPU_SUM_BY_PARTS, READ_TOKENS, SHARED_TOKENS, num_micro_steps
from .hardware import Hardware
from .shapes import WEIGHT_BYTES, ModelShape

KERNELS_A_LAYER = 8  # four products, two norms, rope with the KV write, attention, activation; one is fused
SUM_BYTES = 2  # of a number in a sum between ranks
RESIDUAL_BYTES = 4  # of a number that a stage sends to the next
QUERY_BYTES, PART_BYTES = 2, 4  # of a number of queries, and of attention over one rank's keys
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
    sequence_parallel: int = 1,
) -> StepTime:
    """A step in which ``rows`` sequences decode one token each, with ``context`` tokens before it on average, beside
    ``prefill`` tokens of prompts with ``prefill_context`` tokens before them on average. Counts may be fractions.

    With ``tensor_parallel`` ranks each has its share of the work, and two sums a layer and one of the embedding join
    the results. With ``pipeline_parallel`` stages the layers are run in turns of a micro-step each. Each of
    ``expert_parallel`` parts of the ranks has some of the experts. Each of ``sequence_parallel`` copies of the ranks
    has a part of the keys and values, and runs a part of a long step's tokens.
    """
    if sequence_parallel < 1:
        raise InvalidParams(f"sequence_parallel={sequence_parallel}: give 1 or more", where="sequence_parallel")
    whole, shape = shape, shape.share(tensor_parallel, stages=pipeline_parallel, expert_parts=expert_parallel)
    tokens = rows + prefill
    micro_steps = num_micro_steps(pipeline_parallel, tokens, read_tokens=_read_tokens(whole, hardware))
    turns = micro_steps + pipeline_parallel - 1
    all_rows, rows, prefill, tokens = rows, rows / micro_steps, prefill / micro_steps, tokens / micro_steps
    layers = turns * shape.num_layers
    step_tokens, is_shared = tokens, tokens >= SHARED_TOKENS * sequence_parallel > SHARED_TOKENS
    if is_shared:
        tokens /= sequence_parallel
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
        + _attention_s(shape, hardware, rows, context / sequence_parallel, hardware.score_rate)
        + _attention_s(
            shape, hardware, prefill, prefill_context / sequence_parallel, hardware.prefill_score_rate, queries=64.0
        )
    )
    sums = 2 * shape.num_layers + 1 if tensor_parallel > 1 else 0
    rounds, sum_bytes = _sum(tokens * shape.hidden, tensor_parallel)
    stage_bytes = tokens * shape.hidden * RESIDUAL_BYTES if pipeline_parallel > 1 else 0.0
    collectives = turns * sums * hardware.transfer_s(sum_bytes, count=rounds) if sums else 0.0
    if pipeline_parallel > 1:
        collectives += turns * hardware.transfer_s(stage_bytes)
    visits, visit_bytes = 0, 0.0  # of queries to other ranks' keys, in all layers
    if sequence_parallel > 1:
        visits = shape.num_layers * (3 if is_shared else 1)
        visit_bytes = shape.num_layers * _visit_bytes(shape, step_tokens, sequence_parallel, is_shared=is_shared)
        collectives += turns * hardware.transfer_s(visit_bytes, count=visits)
    return StepTime(
        linear=layers * _products_s(shape, hardware, tokens),
        attention=layers * attention,
        small_ops=layers * _small_ops_s(shape, hardware, tokens),
        head=head,
        host=hardware.host_step_s
        + all_rows * hardware.host_row_s
        + (all_rows * whole.vocab_size / hardware.logit_rate if hardware.logit_rate else 0.0),
        collectives=collectives,
        num_collectives=micro_steps * (sums * rounds + visits + (pipeline_parallel > 1)),
        sent_bytes=micro_steps * (sums * sum_bytes + visit_bytes + stage_bytes),
    )


def _visit_bytes(shape: ModelShape, tokens: float, ranks: int, *, is_shared: bool) -> float:
    """What one rank sends in a layer so that all queries of the step meet all keys."""
    part = tokens * shape.num_heads * (shape.head_dim + 1) * PART_BYTES
    if not is_shared:  # to every other rank
        return (ranks - 1) * part
    queries = tokens * shape.num_heads * shape.head_dim * QUERY_BYTES
    kept = 2 * tokens / ranks * shape.num_kv_heads * shape.head_dim * shape.kv_bytes
    return (ranks - 1) / ranks * (queries + kept + part)


def _read_tokens(shape: ModelShape, hardware: Hardware) -> float:
    """For how many tokens products take as long as for one."""
    if hardware.curves:
        return READ_TOKENS
    each = hardware.product_rate * shape.layer_weight_bytes / (2 * hardware.read_rate)
    return each * shape.num_experts / shape.experts_per_token if shape.num_experts else each


def _sum(count: float, ranks: int) -> tuple[int, float]:
    """The collectives of a sum of ``count`` numbers, and the bytes that one rank sends. Experts are joined so too: a
    GPU's host does not know which rank has results.
    """
    size_bytes = count * SUM_BYTES
    if count < GPU_SUM_BY_PARTS or ranks <= 2:  # every rank gets all tensors
        return 1, (ranks - 1) * size_bytes
    return 2, 2 * (ranks - 1) / ranks * size_bytes


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
