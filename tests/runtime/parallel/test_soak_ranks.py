"""Random programs with aborts on two ranks, in a cache of a tenth of the slots they need.

``PHLOEM_SOAK_RANKS`` sets their number: 60 by default, on virtual ranks; 2,000 with ``make soak-ranks``, on processes.
"""

import logging
import os
from pathlib import Path

import pytest
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import CLIENT
from phloem.tests.runtime.engine.test_soak import NUM_SLOTS, Record, run_round
from phloem.tests.runtime.parallel.virtual import VirtualGang

NUM_REQUESTS = int(os.environ.get("PHLOEM_SOAK_RANKS", "60"))
PER_ROUND = 500

log = logging.getLogger(__name__)


@pytest.mark.parametrize("split", ["tensor_parallel", "sequence_parallel"])
def test_two_ranks_end_every_op_once_and_lose_no_slot(tiny_model_path: Path, split: str) -> None:
    config = EngineConfig(
        model=str(tiny_model_path),
        precision="float32",
        num_slots=NUM_SLOTS,
        max_running=32,
        max_step_tokens=256,
        prefill_chunk=64,
        num_threads=1,
        rank_timeout_s=60.0,
        **{split: 2},
    )
    is_long = "PHLOEM_SOAK_RANKS" in os.environ
    engine = EngineCore(config, gang=None if is_long else VirtualGang(config))
    record = Record()
    for seed in range(-(-NUM_REQUESTS // PER_ROUND)):
        run_round(engine, min(PER_ROUND, NUM_REQUESTS), seed=seed, record=record)
        engine.drop_client(CLIENT)
        engine.cache.flush()
        log.info("%d programs, %d preemptions", record.num_requests, engine.scheduler.num_preemptions)
    assert record.num_requests >= NUM_REQUESTS
    assert record.wrong_ends == [] and set(record.lost_slots) == {0}
    assert max(record.need_tokens) > 2 * NUM_SLOTS and record.num_cancelled > 0
    engine.close()
