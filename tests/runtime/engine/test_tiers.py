"""KV in host memory and on disk behind an engine: found again, verified, and without effect on answers."""

import logging
import shutil

import pytest
from phloem.protocol import ops as o
from phloem.protocol.errors import InvalidParams
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.quantizing.quantize import quantize_model
from phloem.tests.runtime.engine.driver import Driver

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [f"{n} " + "the sap rises and the leaves fall " * 12 for n in range(4)]  # about 410 tokens each


def make_engine(path, **options) -> EngineCore:
    options = {"num_slots": 4096, "precision": "float32"} | options
    config = EngineConfig(model=str(path), num_threads=1, **options)
    engine = EngineCore(config)
    if engine.tiers is not None:
        engine.tiers.clock = lambda: 0.0  # copies and reads take no time, so none is refused or late
    return engine


def ask(engine: EngineCore, prompt: str) -> tuple[tuple[int, ...], int]:
    """The answer's tokens, and the number of prompt tokens found in the cache."""
    ops = [o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=GREEDY), o.Close(op=2, seq=0)]
    meta = Driver(engine).run(ops).done[1].meta
    return meta.candidates[0].token_ids, meta.cached_tokens


@pytest.fixture(scope="module")
def cold(tiny_model_path) -> list[tuple[int, ...]]:
    engine = make_engine(tiny_model_path, prefix_cache=False)
    answers = [ask(engine, prompt)[0] for prompt in PROMPTS]
    engine.close()
    return answers


def test_evicted_kv_comes_back_from_host_memory(tiny_model_path, cold):
    engine = make_engine(tiny_model_path, num_slots=512, host_cache_bytes=64 << 20)
    assert [ask(engine, prompt) for prompt in PROMPTS] == [(answer, 0) for answer in cold]
    for prompt, answer in zip(PROMPTS, cold, strict=True):
        tokens, num_cached = ask(engine, prompt)
        assert tokens == answer and num_cached >= len(prompt) // 64 * 64
    assert engine.tiers.counters.restored > 0
    engine.close()


def test_kv_comes_back_where_programs_that_wait_hold_all_slots(tiny_model_path, cold):
    engine = make_engine(tiny_model_path, num_slots=512, host_cache_bytes=64 << 20)
    driver = Driver(engine)

    def asked(prompt: str) -> tuple[tuple[int, ...], int]:
        """As ``ask``; the program does not end."""
        meta = driver.run([o.Text(op=0, seq=0, text=prompt), o.Gen(op=1, seq=0, params=GREEDY)]).done[1].meta
        return meta.candidates[0].token_ids, meta.cached_tokens

    assert [asked(prompt) for prompt in PROMPTS] == [(answer, 0) for answer in cold]
    assert engine.cache.num_free + engine.cache.num_evictable < len(PROMPTS[0]) // 64 * 64
    tokens, num_cached = asked(PROMPTS[0])
    assert tokens == cold[0] and num_cached >= len(PROMPTS[0]) // 64 * 64
    engine.close()


def test_after_a_restart_prefixes_come_from_disk_and_answers_are_equal(tiny_model_path, tmp_path, cold):
    engine = make_engine(tiny_model_path, disk_cache=str(tmp_path))
    assert [ask(engine, prompt) for prompt in PROMPTS] == [(answer, 0) for answer in cold]
    engine.close()
    engine = make_engine(tiny_model_path, disk_cache=str(tmp_path))
    for prompt, answer in zip(PROMPTS, cold, strict=True):
        tokens, num_cached = ask(engine, prompt)
        assert tokens == answer and num_cached >= len(prompt) // 64 * 64
    engine.close()


TALK = "A gardener and a guest talk about trees. "


def talk(engine: EngineCore) -> tuple[int, int, int]:
    """Three talks that begin alike, of three turns each: prompt tokens, cached ones, and those of no whole block.

    The tiny model's tokens are bytes, so that lengths of texts are lengths in tokens.
    """
    prompts = [TALK * 5 + f"Talk {i}. " + TALK * 3 * turn for turn in range(1, 4) for i in range(3)]
    cached = [ask(engine, prompt)[1] for prompt in prompts]
    return sum(map(len, prompts)), sum(cached), sum(len(prompt) % 64 for prompt in prompts)


def assert_restart_keeps_hits(path, **options) -> None:
    """The hit share after a restart is that before it, or less by the tokens that were in no whole block."""
    engine = make_engine(path, **options)
    num_tokens, num_cold, _ = talk(engine)
    again, num_warm, num_unsaved = talk(engine)
    assert again == num_tokens and num_warm > 0.95 * num_tokens > num_cold
    engine.close()
    engine = make_engine(path, **options)
    _, num_restarted, _ = talk(engine)
    assert num_warm - num_unsaved <= num_restarted <= num_warm
    assert engine.tiers.counters.read > 0
    engine.close()


def test_a_restart_costs_hits_of_the_unsaved_ends_of_prompts_alone(tiny_model_path, tmp_path):
    assert_restart_keeps_hits(tiny_model_path, disk_cache=str(tmp_path))


def test_an_idle_engine_writes_blocks_to_disk(tiny_model_path, tmp_path):
    engine = make_engine(tiny_model_path, disk_cache=str(tmp_path))
    ask(engine, PROMPTS[0])
    for _ in range(3):
        engine.step([])
    engine.tiers.wait()
    assert len(list(tmp_path.rglob("*.kv"))) == len(PROMPTS[0]) // 64
    engine.close()


def test_a_corrupt_file_is_ignored_with_one_line(tiny_model_path, tmp_path, cold, caplog):
    engine = make_engine(tiny_model_path, disk_cache=str(tmp_path))
    ask(engine, PROMPTS[0])
    engine.close()
    for file in tmp_path.rglob("*.kv"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    engine = make_engine(tiny_model_path, disk_cache=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert ask(engine, PROMPTS[0]) == (cold[0], 0)
        assert ask(engine, PROMPTS[0])[0] == cold[0]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines)) == len(PROMPTS[0]) // 64 and "ignored" in lines[0]
    engine.close()


def test_another_model_or_number_format_does_not_use_the_blocks(tiny_model_path, tmp_path):
    engine = make_engine(tiny_model_path, disk_cache=str(tmp_path / "kv"))
    ask(engine, PROMPTS[0])
    engine.close()
    other = tmp_path / "model"
    shutil.copytree(tiny_model_path, other)
    weights = next(other.glob("*.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-2] ^= 8
    weights.write_bytes(raw)
    for path, options in ((other, {}), (tiny_model_path, {"cache_format": "int8"})):
        engine = make_engine(path, disk_cache=str(tmp_path / "kv"), **options)
        assert ask(engine, PROMPTS[0])[1] == 0
        engine.close()


def test_one_byte_blocks_take_a_quarter_of_float32_and_are_found_again(tiny_model_path, tmp_path):
    sizes = {}
    for format in ("auto", "int8", "fp8"):
        folder = tmp_path / format
        engine = make_engine(tiny_model_path, disk_cache=str(folder), cache_format=format)
        ask(engine, PROMPTS[0])
        engine.close()
        sizes[format] = next(folder.rglob("*.kv")).stat().st_size
        engine = make_engine(tiny_model_path, disk_cache=str(folder), cache_format=format)
        assert ask(engine, PROMPTS[0])[1] >= len(PROMPTS[0]) // 64 * 64
        engine.close()
    assert sizes["int8"] == sizes["fp8"] < 0.33 * sizes["auto"]


def test_8_bit_keys_and_values_come_back_from_host_memory_and_disk_with_equal_answers(tiny_model_path, tmp_path):
    # With weights of 4 bits a token's keys have equal bits in every batch.
    model = quantize_model(tiny_model_path, tmp_path / "packed", "int4-g32").path
    options = {"precision": "auto", "kv_dtype": "int8", "prefill_chunk": 64}
    engine = make_engine(model, prefix_cache=False, **options)
    answers = [ask(engine, prompt)[0] for prompt in PROMPTS]
    engine.close()
    folder = tmp_path / "kv"
    engine = make_engine(model, num_slots=512, disk_cache=str(folder), **options)
    for _ in range(2):
        assert [ask(engine, prompt)[0] for prompt in PROMPTS] == answers
    assert engine.tiers.counters.restored > 0
    block = next(folder.rglob("*.kv")).stat().st_size
    assert 0 <= block - 64 * engine.kv.size_bytes // engine.kv.num_slots < 1024  # as in the pool, and a header
    engine.close()
    engine = make_engine(model, disk_cache=str(folder), **options)
    found = [ask(engine, prompt) for prompt in PROMPTS]
    assert [tokens for tokens, _ in found] == answers and all(num_cached >= 256 for _, num_cached in found)
    engine.close()
    with pytest.raises(InvalidParams, match="cache_format='fp8': with kv_dtype 'int8' blocks have 8 bits already; use"):
        make_engine(model, disk_cache=str(folder), cache_format="fp8", **options)


def test_two_engines_on_one_host_share_what_each_has_computed(tiny_model_path, tmp_path, cold):
    engines = [make_engine(tiny_model_path, disk_cache=str(tmp_path)) for _ in range(2)]
    for asked_first, asked_next, n in ((0, 1, 0), (1, 0, 1)):
        assert ask(engines[asked_first], PROMPTS[n]) == (cold[n], 0)
        engines[asked_first].tiers.flush()
        tokens, num_cached = ask(engines[asked_next], PROMPTS[n])
        assert tokens == cold[n] and num_cached >= len(PROMPTS[n]) // 64 * 64
    for engine in engines:
        engine.close()


def test_a_preempted_sequence_comes_back_from_host_memory(tiny_model_path):
    """Four sequences that together need more slots than the pool has; each gives the answer that it gives alone."""
    long = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)

    def ops(n: int) -> list[o.AnyOp]:
        text = f"{n} {PROMPTS[n][:150]}"
        return [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=long), o.Close(op=2, seq=0)]

    engine = make_engine(tiny_model_path, speculative="off")
    alone = [Driver(engine).run(ops(n)).done[1].meta.candidates[0].token_ids for n in range(4)]
    engine.close()
    engine = make_engine(tiny_model_path, speculative="off", num_slots=900, host_cache_bytes=64 << 20)
    driver = Driver(engine)
    outcomes = [driver.submit(ops(n)) for n in range(4)]
    driver.run()
    assert [outcome.done[1].meta.candidates[0].token_ids for outcome in outcomes] == alone
    assert engine.scheduler.counters.num_preemptions > 0 and engine.scheduler.counters.num_swapped_back > 0
    engine.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host_cache_bytes": 100}, "one block of 64 tokens"),
        ({"host_cache_bytes": -1}, "must be 0"),
        ({"host_cache_bytes": 1 << 20, "prefix_cache": False}, "they need prefix_cache"),
        ({"disk_cache": "/dev/null/kv"}, "cannot be used"),
    ],
)
def test_impossible_options_are_refused_by_name(tiny_model_path, options, words):
    with pytest.raises(InvalidParams, match=words):
        make_engine(tiny_model_path, **options)
