"""On a GPU the KV pool fills the memory that the weights and the largest step leave."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from phloem.protocol.errors import InvalidParams, LimitExceeded
from phloem.runtime.config import EngineConfig, sized
from phloem.runtime.engine import EngineCore
from phloem.runtime.executor.sizing import greatest_step
from phloem.runtime.memory import slot_size_bytes
from phloem.tests.runtime.executor.stand_in import StandIn

MIB = 1 << 20


def engine_on(path: Path, device: StandIn, **options: Any) -> EngineCore:
    config = EngineConfig(model=str(path), precision="float32", max_seq_len=256, num_threads=1, **options)
    return EngineCore(config, accelerator=device)


def test_slots_fill_the_memory_that_weights_and_the_largest_step_leave(tiny_model_path: Path) -> None:
    device = StandIn(memory=(70 * MIB, 100 * MIB), peak_bytes=5 * MIB)
    engine = engine_on(tiny_model_path, device, gpu_memory_fraction=0.8)
    each = slot_size_bytes(engine.model.config, engine.kv.dtype)
    assert engine.cache.num_slots == (80 - 30 - 2 * 5) * MIB // each - 1
    assert engine.kv.num_slots == engine.cache.num_slots + 1  # the executor owns one
    assert len(device.trials) == 2


def test_a_given_number_of_slots_is_not_measured(tiny_model_path: Path) -> None:
    device = StandIn()
    assert engine_on(tiny_model_path, device, num_slots=700).cache.num_slots == 700
    assert not device.trials


def test_too_little_memory_is_refused_with_the_sizes_and_the_way_out(tiny_model_path: Path) -> None:
    with pytest.raises(LimitExceeded, match=r"fraction 0\.5 of 104,857,600 bytes leaves 0 .* lower max_step_tokens"):
        engine_on(tiny_model_path, StandIn(memory=(20 * MIB, 100 * MIB)), gpu_memory_fraction=0.5)
    with pytest.raises(InvalidParams, match=r"gpu_memory_fraction=1\.5: must be above 0 and at most 1"):
        engine_on(tiny_model_path, StandIn(), gpu_memory_fraction=1.5)


def test_the_largest_step_has_all_tokens_all_rows_and_the_longest_context() -> None:
    plan = greatest_step(8, 100, context_len=500, num_slots=100)
    assert plan.num_tokens == 100 and len(plan.rows) == 8
    assert max(row.end for row in plan.rows) == 500
    assert all(row.num_logits == 1 and len(row.slot_ids) == row.end for row in plan.rows)
    assert max(int(np.max(row.slot_ids)) for row in plan.rows) < 100


@pytest.mark.parametrize(("device", "sizes"), [("cpu", (64, 512, 256)), ("cuda:1", (256, 8192, 4096))])
def test_sizes_of_a_step_that_are_not_given_are_those_of_the_device(device: str, sizes: tuple[int, ...]) -> None:
    def read(config: EngineConfig) -> tuple[int, ...]:
        return config.max_running, config.max_step_tokens, config.prefill_chunk

    config = EngineConfig(model="tiny", device=device)
    assert read(sized(config)) == sizes and sized(sized(config)) == sized(config)
    given = EngineConfig(model="tiny", device=device, max_running=3, prefill_chunk=5)
    assert read(sized(given)) == (3, sizes[1], 5)
