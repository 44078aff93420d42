"""An engine with several threads gives the answers of an engine with one, with forks, grammars and draws.

The engines of other tests have one thread for each core of their test worker, often one.
"""

from pathlib import Path

import pytest
from phloem import kernels
from phloem.kernels import threads
from phloem.protocol.ops import AnyOp, Close, Fork, Gen, GrammarSpec, Text
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.tests.runtime.engine.driver import Driver, prompts

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=5, ignore_eos=True)


def program(text: str) -> list[AnyOp]:
    return [
        Text(op=0, seq=0, text=text),
        Fork(op=1, seq=0, children=(1, 2)),
        Gen(op=2, seq=0, params=GREEDY),
        Gen(op=3, seq=1, params=DRAWN),
        Gen(op=4, seq=2, params=GREEDY, grammar=GrammarSpec("regex", "[0-9]{3}")),
        *(Close(op=5 + seq, seq=seq) for seq in range(3)),
    ]


def answers(path: Path, precision: str, num_threads: int, *, own_pool: bool) -> list[list[object]]:
    config = EngineConfig(str(path), precision=precision, num_slots=4096, num_threads=num_threads)
    engine = EngineCore(config)
    assert threads.team().size == num_threads
    assert (threads.team().pool is not None) == own_pool
    driver = Driver(engine)
    outcomes = [driver.submit(program(text)) for text in prompts(3, longest=120)]
    driver.run()
    engine.close()
    kernels.set_threads(0)
    return [[outcome.value(op) for op in (2, 3, 4)] for outcome in outcomes]


@pytest.mark.usefixtures("every_core")
def test_float32_products_on_torch_s_threads_give_the_answers_of_one(tiny_model_path: Path) -> None:
    alone, together = (answers(tiny_model_path, "float32", n, own_pool=False) for n in (1, 2))
    assert together == alone


@pytest.mark.model
@pytest.mark.usefixtures("every_core")
def test_packed_products_on_the_kernels_own_pool_give_the_answers_of_one_thread(smollm2_path: Path) -> None:
    alone, together = (answers(smollm2_path, "auto", n, own_pool=n > 1) for n in (1, 2))
    assert together == alone
