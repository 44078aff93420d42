"""Plans: times add up and grow with the bytes read, and the batch keeps its bounds and names them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from phloem.cli import main
from phloem.protocol.errors import InvalidParams, Unsupported
from phloem.runtime.planning import (
    HARDWARE,
    KV_BYTES,
    SHAPES,
    DeviceSplit,
    Goal,
    Hardware,
    ModelShape,
    best_split,
    find_capacity,
    step_time,
)
from phloem.runtime.planning.hardware import interpolate
from phloem.runtime.planning.towers import TowerShape
from phloem.runtime.weights.vision_config import ImageForm, VisionConfig

LLAMA = replace(SHAPES["llama-3.1-8b"], weight_bits=16)
H200 = HARDWARE["h200"]


def test_a_decode_step_of_one_row_reads_every_weight_once() -> None:
    step = step_time(LLAMA, H200, rows=1, context=0)
    read_s = LLAMA.num_layers * LLAMA.layer_weights * 2 / H200.read_rate
    assert step.linear == pytest.approx(read_s)
    assert step.head == pytest.approx(LLAMA.head_weights * 2 / H200.read_rate)
    assert step.attention == 0.0
    assert step.total == step.linear + step.attention + step.small_ops + step.head + step.host


def test_the_size_of_a_model_matches_its_name() -> None:
    sizes = {"llama-3.1-8b": 8.03, "llama-3.3-70b": 70.6, "llama-3.1-405b": 405.9, "qwen3-8b": 8.19}
    for name, billions in sizes.items():
        assert replace(SHAPES[name], weight_bits=16).weights_size_bytes / 2e9 == pytest.approx(billions, rel=0.01)
    assert LLAMA.slot_size_bytes == 2 * 32 * 8 * 128 * 2


def test_products_of_many_rows_are_bound_by_arithmetic() -> None:
    few, many = (step_time(LLAMA, H200, rows=rows, context=0).linear for rows in (1, 8))
    assert few == many
    assert step_time(LLAMA, H200, rows=2000, context=0).linear > 3 * many


def test_curves_are_interpolated_and_proportional_beyond_their_end() -> None:
    curve = ((1.0, 2.0), (4.0, 8.0), (8.0, 10.0))
    assert [interpolate(curve, x) for x in (0.5, 1.0, 2.5, 4.0, 6.0, 8.0, 16.0)] == [2, 2, 5, 8, 9, 10, 20]


@pytest.mark.parametrize("bounds", [{"tpot_s": 0.03}, {"ttft_s": 0.06}, {"tpot_s": 0.02, "ttft_s": 0.5}])
def test_one_more_sequence_would_break_the_goal(bounds: dict[str, float]) -> None:
    goal = Goal(1000, 200, **bounds)
    found = find_capacity(LLAMA, H200, goal)
    assert found.batch > 1 and found.tpot_s <= goal.tpot_s and found.ttft_s <= goal.ttft_s
    assert found.limit.startswith(("time per token", "time to first token"))
    looser = find_capacity(LLAMA, H200, Goal(1000, 200, **{name: 2 * bound for name, bound in bounds.items()}))
    assert looser.batch > found.batch and looser.tokens_per_s > found.tokens_per_s


def test_without_a_goal_memory_bounds_the_batch() -> None:
    found = find_capacity(LLAMA, H200, Goal(4000, 1000))
    assert found.limit.startswith("memory for keys and values; no goal for times was given")
    assert found.batch == found.slots // 5000


def test_replicas_carry_the_load() -> None:
    goal = Goal(1000, 200, tpot_s=0.03)
    found = find_capacity(LLAMA, H200, goal)
    count = found.replicas(goal, 50.0)
    assert count * found.tokens_per_s >= 50 * 200 > (count - 1) * found.tokens_per_s


def test_a_cached_prefix_allows_a_larger_batch() -> None:
    plain, cached = (find_capacity(LLAMA, H200, Goal(1000, 200, tpot_s=0.03, cached_share=s)) for s in (0.0, 0.9))
    assert cached.batch > plain.batch and cached.ttft_s < plain.ttft_s


def test_a_model_that_does_not_fit_is_named_with_the_memory_it_needs() -> None:
    found = find_capacity(replace(SHAPES["llama-3.3-70b"], weight_bits=16), HARDWARE["l4"], Goal(100, 100))
    assert found.batch == 0 and "memory: 141" in found.limit
    with pytest.raises(InvalidParams, match="no replica meets the goal"):
        found.replicas(Goal(100, 100), 1.0)


def test_impossible_numbers_are_named() -> None:
    with pytest.raises(InvalidParams, match="isl=0: must be more than 0"):
        Goal(0, 1)
    with pytest.raises(InvalidParams, match=r"cached_share=1.0: must be at least 0 and below 1"):
        Goal(1, 1, cached_share=1.0)
    with pytest.raises(InvalidParams, match="weight_bits=5"):
        replace(LLAMA, weight_bits=5)


def test_a_cpu_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phloem.runtime.planning import measured

    curve = ((1.0, 0.03), (16.0, 0.07))
    fake = Hardware(
        "cpu",
        1e10,
        1e10,
        1e11,
        1e-6,
        1e-3,
        1e-5,
        "fake",
        curves={4: curve},
        product_calls={4: curve},
        key_rate=1e10,
        score_rate=1e11,
    )
    calls = []
    monkeypatch.setattr(measured, "measure_cpu", lambda threads: calls.append(threads) or fake)
    assert measured.cpu_hardware(tmp_path, threads=1) == fake
    assert measured.cpu_hardware(tmp_path, threads=1) == fake
    assert calls == [1]
    measured.cpu_hardware(tmp_path, threads=1, again=True)
    assert calls == [1, 1]


def test_plan_prints_what_one_replica_carries(capsys: pytest.CaptureFixture[str]) -> None:
    goal = ["--isl", "1000", "--osl", "200", "--ttft-s", "0.5", "--tpot-s", "0.03", "--rate", "50"]
    assert main(["plan", "llama-3.1-8b", "--hardware", "h200", *goal]) == 0
    out = capsys.readouterr().out
    assert "bounded by time per token" in out and "50 requests/s: 3 replicas" in out
    assert main(["plan", "no-such-shape"]) == 2
    assert "shapes that need no weights: smollm2, " in capsys.readouterr().err
    assert main(["plan", "llama-3.3-70b", "--hardware", "l4"]) == 2
    assert "not even one sequence: memory" in capsys.readouterr().out


def test_8_bit_keys_and_values_leave_room_for_more_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    halves, eighths = find_capacity(LLAMA, H200, Goal(1000, 200)), replace(LLAMA, kv_bytes=KV_BYTES["fp8"])
    assert find_capacity(eighths, H200, Goal(1000, 200)).slots == pytest.approx(2 * halves.slots, rel=1e-4)
    assert replace(LLAMA, kv_bytes=KV_BYTES["int8"]).slot_size_bytes == 2 * 32 * 8 * (128 + 2 * 8)
    assert main(["plan", "llama-3.1-8b", "--hardware", "h200", "--kv-dtype", "fp8"]) == 0
    assert "keys and values 65.5 kB a token" in capsys.readouterr().out
    assert main(["plan", "llama-3.1-8b", "--hardware", "h200", "--kv-dtype", "int8"]) == 2
    assert "--kv-dtype int8 on h200: no kernel reads it there; give one of float32, " in capsys.readouterr().err


def test_a_shape_is_read_from_a_model(tmp_path: Path) -> None:
    from phloem.runtime.weights import open_weights
    from phloem.tests.runtime.models.tiny import make_tiny_model

    config = open_weights(make_tiny_model(tmp_path / "tiny", seed=1)).config
    shape = ModelShape.of_config("tiny", config)
    assert (shape.num_layers, shape.hidden, shape.tied) == (2, 64, False)


def test_a_file_of_mixed_formats_has_a_share_of_8_bit_weights(tmp_path: Path) -> None:
    from phloem.runtime.weights import open_weights
    from phloem.tests.runtime.models.tiny import make_tiny_gguf

    four = ModelShape.of_file(
        "four", open_weights(make_tiny_gguf(tmp_path / "4.gguf", seed=1, kinds={"weight": "Q4_0"}))
    )
    assert (four.weight_bits, four.eight_bit_share) == (4, 0.0)
    kinds = {"weight": "Q4_0", "down_proj": "Q8_0"}
    mixed = ModelShape.of_file("mixed", open_weights(make_tiny_gguf(tmp_path / "m.gguf", seed=1, kinds=kinds)))
    down = mixed.hidden * mixed.inner / mixed.layer_weights
    assert mixed.weight_bits == 4 and mixed.eight_bit_share == pytest.approx(down)
    assert four.weights_size_bytes < mixed.weights_size_bytes
    eight = ModelShape.of_file(
        "eight", open_weights(make_tiny_gguf(tmp_path / "8.gguf", seed=1, kinds={"weight": "Q8_0"}))
    )
    assert (eight.weight_bits, eight.eight_bit_share) == (8, 0.0)


def test_a_product_costs_its_call_its_inputs_and_its_weights() -> None:
    flat = ((1.0, 1.0), (64.0, 1.0))  # one nanosecond a weight for any number of rows
    call = ((1.0, 1e-6), (64.0, 9e-6))
    cpu = Hardware("cpu", 1e10, 1e10, 1e11, 5e-6, 0.0, 0.0, curves={4: flat, 16: flat}, product_calls={4: call})

    def seconds(outputs: int, inputs: int, rows: float, bits: int = 4) -> float:
        return cpu.product_s(outputs, inputs, rows, bits=bits, weight_bytes=0.625)

    assert seconds(100, 1024, 1) == pytest.approx(102_400e-9 + 1e-6)
    assert seconds(100, 1024, 64) == pytest.approx(102_400e-9 + 9e-6)
    assert seconds(100, 2048, 64) == pytest.approx(204_800e-9 + 17e-6)
    assert seconds(100, 1024, 64, bits=16) == pytest.approx(102_400e-9 + 5e-6)


def test_half_the_weights_in_eight_bits_cost_what_half_of_each_does() -> None:
    curves = {4: ((1.0, 0.01), (8.0, 0.02)), 8: ((1.0, 0.03), (8.0, 0.06))}
    cpu = Hardware("cpu", 1e10, 1e10, 1e11, 0.0, 0.0, 0.0, curves=curves)
    four, eight = (replace(LLAMA, weight_bits=bits) for bits in (4, 8))
    mixed = step_time(replace(four, eight_bit_share=0.5), cpu, rows=4, context=0).linear
    ends = [step_time(shape, cpu, rows=4, context=0).linear for shape in (four, eight)]
    assert mixed == pytest.approx(sum(ends) / 2) and ends[0] < ends[1]


def test_the_host_s_part_of_a_step_is_measured_in_milliseconds_at_most() -> None:
    from phloem import kernels
    from phloem.runtime.planning.host import host_seconds

    step_s, row_s = host_seconds(1)
    kernels.set_threads(0)
    assert 1e-6 < step_s < 0.5 and 0.0 <= row_s < step_s + 0.1


def test_a_share_of_every_rank_makes_the_whole_and_copies_key_value_heads_beyond_their_number() -> None:
    shape = replace(SHAPES["llama-3.3-70b"], weight_bits=16)
    share = shape.share(8)
    assert (share.num_heads, share.num_kv_heads, share.inner, share.vocab_size) == (8, 1, 3584, 16_032)
    assert 8 * share.layer_weights == shape.layer_weights and 8 * share.slot_size_bytes == shape.slot_size_bytes
    mixture = SHAPES["qwen3-235b-a22b"].share(8)
    assert (mixture.num_heads, mixture.num_kv_heads) == (8, 1)  # of 4: two ranks hold a copy of each
    small = SHAPES["smollm2"].share(2)
    assert (small.num_heads, small.num_kv_heads) == (6, 2)  # the larger of 6 and 3
    with pytest.raises(InvalidParams, match="tensor_parallel=10: smollm2 has 9 heads"):
        SHAPES["smollm2"].share(10)


def test_ranks_read_less_and_add_collectives() -> None:
    shape, h100 = replace(SHAPES["llama-3.3-70b"], weight_bits=16), HARDWARE["h100"]
    one, eight = (step_time(shape, h100, rows=16, context=500, tensor_parallel=size) for size in (1, 8))
    assert eight.linear == pytest.approx(one.linear / 8) and one.collectives == 0.0
    sums = 2 * 80 + 1
    sent = 7 * 16 * 8192 * 2  # all get all tensors at once
    assert eight.collectives == pytest.approx(sums * (h100.collective_s + sent / h100.link_rate))
    assert eight.num_collectives == sums and eight.sent_bytes == sums * sent
    many = step_time(shape, h100, rows=64, context=500, tensor_parallel=8)
    assert many.num_collectives == 2 * sums and many.sent_bytes == sums * 2 * 7 / 8 * 64 * 8192 * 2
    assert eight.total < one.total


def test_a_mixture_reads_the_experts_that_its_tokens_take() -> None:
    shape = replace(SHAPES["qwen3-235b-a22b"], weight_bits=16)
    assert shape.weights_size_bytes / 2e9 == pytest.approx(235, rel=0.01)
    assert shape.experts_read(1) == pytest.approx(8) and 127 < shape.experts_read(100) < 128
    few, many = (step_time(shape, HARDWARE["h100"], rows=rows, context=0).linear for rows in (1, 64))
    assert few < many < 16 * few


def test_the_best_split_of_eight_devices_has_most_tokens_a_second() -> None:
    shape = replace(SHAPES["llama-3.3-70b"], weight_bits=16)
    found = best_split(shape, HARDWARE["h100"], Goal(1000, 200), devices=8)
    rates = [one.tokens_per_s * (8 // one.split.num_devices) for one in found]
    assert rates == sorted(rates, reverse=True)
    sizes = (1, 2, 4, 8)
    meshes = {DeviceSplit(t, p, sequence=s) for t in sizes for p in sizes for s in sizes if t * p * s <= 8}
    assert {one.split for one in found} == meshes
    of_tensors = {one.split.sequence: one.batch for one in found if (one.split.tensor, one.split.pipeline) == (4, 1)}
    assert of_tensors[2] > 1.9 * of_tensors[1]  # twice the slots
    assert next(one for one in found if one.split == DeviceSplit()).batch == 0  # 141 GB do not fit into one device
    mixture = best_split(
        replace(SHAPES["qwen3-235b-a22b"], weight_bits=16), HARDWARE["h100"], Goal(1000, 200), devices=8
    )
    assert {one.split.expert for one in mixture if one.split.tensor == 8} == {1, 8}
    with pytest.raises(InvalidParams, match="--tensor-parallel 2 on l4: the rate of its links is not known"):
        find_capacity(shape, HARDWARE["l4"], Goal(1000, 200), split=DeviceSplit(2))


def test_stages_hold_fewer_bytes_and_wait_for_each_other() -> None:
    shape, h100 = replace(SHAPES["llama-3.3-70b"], weight_bits=16), HARDWARE["h100"]
    one = step_time(shape, h100, rows=1, context=500)
    four = step_time(shape, h100, rows=1, context=500, pipeline_parallel=4)
    assert four.linear == pytest.approx(one.linear)  # one token passes one stage after the other
    assert four.num_collectives == 1 and four.sent_bytes == 4 * 8192
    many = [step_time(shape, h100, rows=8000, context=500, pipeline_parallel=size) for size in (1, 4)]
    assert many[0].linear / 4 < many[1].linear < many[0].linear / 3
    assert shape.share(2, stages=4).num_layers == 20
    with pytest.raises(InvalidParams, match="pipeline_parallel=81: llama-3.3-70b has 80 layers; give 1 to that many"):
        shape.share(1, stages=81)


def test_experts_on_ranks_are_read_as_often_and_joined_by_sums() -> None:
    shape, h100 = replace(SHAPES["qwen3-235b-a22b"], weight_bits=16, experts_per_token=2), HARDWARE["h100"]
    for rows in (8, 512):
        sums, parts = (
            step_time(shape, h100, rows=rows, context=500, tensor_parallel=8, expert_parallel=size) for size in (1, 8)
        )
        assert parts.linear == pytest.approx(sums.linear, rel=0.01)
        assert parts.num_collectives == sums.num_collectives == (2 * 94 + 1) * (1 if rows == 8 else 2)
        assert parts.sent_bytes == sums.sent_bytes
    assert shape.share(8, expert_parts=8).layer_weights == pytest.approx(shape.share(8).layer_weights)
    with pytest.raises(
        InvalidParams, match="expert_parallel=3: qwen3-235b-a22b has 128 experts, and the number must d"
    ):
        shape.share(8, expert_parts=3)
    with pytest.raises(InvalidParams, match="expert_copies=113: .* split into 8 parts .* copies of 112 others at most"):
        shape.share(8, expert_parts=8, expert_copies=113)


def test_spread_slots_hold_more_tokens_and_long_steps_send_each_query_and_part_once() -> None:
    shape, h100 = replace(SHAPES["llama-3.3-70b"], weight_bits=16), HARDWARE["h100"]
    one, two = (step_time(shape, h100, rows=8, context=9000, sequence_parallel=size) for size in (1, 2))
    assert two.linear == one.linear and two.attention < 0.6 * one.attention  # all run all tokens, over half of the keys
    assert two.num_collectives == 80 and two.sent_bytes == 80 * 8 * 64 * 129 * 4
    one, two = (step_time(shape, h100, rows=0, prefill=2000, context=0, sequence_parallel=size) for size in (1, 2))
    assert two.linear == pytest.approx(one.linear / 2, rel=0.01)
    layer = 2000 * 64 * (128 * 2 + 129 * 4) + 1000 * 2 * 8 * 128 * 2
    assert two.num_collectives == 3 * 80 and two.sent_bytes == 80 * layer / 2
    goal = Goal(1000, 200)
    slots = [find_capacity(shape, h100, goal, split=DeviceSplit(4, sequence=size)).slots for size in (1, 3)]
    assert slots[1] == 3 * slots[0] > 0
    with pytest.raises(InvalidParams, match="sequence_parallel=0: give 1 or more"):
        step_time(shape, h100, rows=1, context=1, sequence_parallel=0)


def test_the_command_compares_splits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.3-70b", "--hardware", "h100", "--devices", "8"]) == 0
    shown = capsys.readouterr().out
    assert "on 8 x h100" in shown and "most tokens a second: --tensor-parallel" in shown
    assert "  sequence  " in shown and "7 other splits: not even one sequence fits" in shown
    assert main(["plan", "llama-3.3-70b", "--hardware", "h100", "--tensor-parallel", "8"]) == 0
    shown = capsys.readouterr().out
    assert "of each of 8 ranks: weights" in shown and "collectives" in shown
    split = ["--tensor-parallel", "4", "--pipeline-parallel", "2", "--expert-parallel", "4", "--sequence-parallel", "2"]
    assert main(["plan", "qwen3-235b-a22b", "--hardware", "h100", *split]) == 0
    assert "each rank joins others' results" in capsys.readouterr().out
    assert main(["plan", "qwen3-235b-a22b", "--hardware", "h100", *split, "--expert-copies", "2"]) == 0
    assert "3.55 GB of the weights are places for copies of experts" in capsys.readouterr().out  # 47 layers


def vision_config(**form: Any) -> VisionConfig:
    """SmolVLM-256M's encoder: 12 layers of 768, tiles of 512 pixels, images of 2,048."""
    sizes = {"num_layers": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "patch_size": 16}
    return VisionConfig(
        **sizes,
        num_positions_a_side=32,
        norm_eps=1e-6,
        scale_factor=4,
        image_token_id=1,
        form=ImageForm(tile_side=512, resized_side=2048, **form),
    )


def test_an_image_encoder_takes_memory_and_time_and_its_images_take_tokens() -> None:
    tower = TowerShape.of_config(vision_config(), 576)
    assert (tower.tiles, tower.tokens) == (17, 17 * 64)
    assert tower.size_bytes / 2 == 12 * 12 * 768**2 + 768 * 3 * 256 + 576 * 16 * 768
    whole = TowerShape.of_config(vision_config(is_split=False), 576)
    assert (whole.tiles, whole.tokens) == (1, 64)
    assert tower.image_s(H200) == pytest.approx(17 * whole.image_s(H200))
    flops = 2 * 1024 * (12 * 12 * 768**2) + 4 * 12 * 1024**2 * 768  # of a tile, nearly
    assert whole.image_s(H200) == pytest.approx(flops / H200.product_rate, rel=0.02)
    shape = replace(SHAPES["smollm2"], weight_bits=16, tower=tower)
    assert shape.weights_size_bytes == replace(shape, tower=None).weights_size_bytes + tower.size_bytes
    text, one = (find_capacity(shape, H200, Goal(100, 50, images=images, tpot_s=0.01)) for images in (0, 1))
    assert one.batch < text.batch and one.ttft_s > text.ttft_s + tower.image_s(H200) / 2
    assert one.step.images == pytest.approx(one.batch * tower.image_s(H200) / 50) and text.step.images == 0.0
    assert one.step.total == one.tpot_s <= 0.01


def test_images_are_planned_for_models_that_read_them_on_one_device() -> None:
    shape = replace(SHAPES["smollm2"], weight_bits=16, tower=TowerShape.of_config(vision_config(), 576))
    with pytest.raises(InvalidParams, match="images=2: llama-3.1-8b reads text only"):
        find_capacity(LLAMA, H200, Goal(100, 50, images=2))
    with pytest.raises(Unsupported, match="smollm2 reads images; the engine runs such models on one device"):
        find_capacity(shape, H200, Goal(100, 50), split=DeviceSplit(tensor=2))
    assert [one.split for one in best_split(shape, H200, Goal(100, 50, images=1), devices=4)] == [DeviceSplit()]


def test_plan_shows_what_images_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from phloem.tests.runtime.vision.tiny_vision import make_tiny_vision

    folder = make_tiny_vision(tmp_path / "tiny")
    goal = ["--isl", "50", "--osl", "20", "--hardware", "h100"]
    assert main(["plan", str(folder), *goal, "--images", "2"]) == 0
    out = capsys.readouterr().out
    assert "and 2 images of " in out and " tiles, " in out and "  images " in out
    assert main(["plan", "llama-3.1-8b", *goal, "--images", "1"]) == 2
    assert "images=1: llama-3.1-8b reads text only" in capsys.readouterr().err
