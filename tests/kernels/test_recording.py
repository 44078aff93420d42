"""A recording keeps kernel calls and their addresses, and notices ops that torch computed."""

import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from phloem import kernels
from phloem.kernels.cpu.recording import Arena, Recording, open_recording
from phloem.kernels.cpu.tape import Tape
from phloem.kernels.linear import PackedLinear


def test_a_tape_computes_from_what_lies_at_its_addresses() -> None:
    arena, weight = Arena(), torch.rand(48)
    x = arena.empty((3, 48), torch.float32)
    x.copy_(torch.randn(3, 48))
    with Recording(arena) as recording:
        y, _ = kernels.rms_norm(x, weight, 1e-5)
        z = kernels.silu_mul(y)
    assert len(recording.calls) == 2 and recording.foreign is None
    tape = Tape(recording.calls, arena)
    for _ in range(3):
        x.copy_(torch.randn(3, 48))
        tape.replay(None)
        assert torch.equal(z, kernels.silu_mul(kernels.rms_norm(x, weight, 1e-5)[0]))


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize(
    "copy", [lambda x: x.t().contiguous(), lambda x: x.t().reshape(-1), lambda x: x.double(), lambda x: x.add_(1)]
)
def test_a_copy_and_a_change_end_a_recording(in_inference_mode: bool, copy: Callable[[torch.Tensor], object]) -> None:
    x = torch.randn(4, 6)
    with torch.inference_mode(in_inference_mode), Recording(Arena()) as recording:
        copy(x)
    assert recording.foreign is not None


def test_views_are_no_computation_and_sums_are() -> None:
    x = torch.randn(4, 6)
    with Recording(Arena()) as recording:
        x.view(2, 12).split(6, dim=1)[1][0].contiguous().float()
    assert recording.foreign is None
    with Recording(Arena()) as recording:
        _ = x + 1
        raise AssertionError("the sum ends the recording")
    assert recording.foreign == "aten::add"
    assert open_recording() is None


def test_a_change_in_place_is_noticed() -> None:
    x = torch.zeros(4)
    with Recording(Arena()) as recording:
        x.add_(1)
    assert recording.foreign == "aten::add_"
    assert not x.any()


def test_errors_leave_a_recording() -> None:
    with pytest.raises(ValueError, match="of the caller"), Recording(Arena()):
        raise ValueError("of the caller")
    assert open_recording() is None


def test_a_product_with_weights_in_a_librarys_own_layout_is_computation() -> None:
    x, linear = torch.randn(2, 64), PackedLinear(torch.randn(48, 64), precision="bfloat16")
    with Recording(Arena()) as recording:
        linear(x.bfloat16())
    assert recording.foreign is not None


def test_a_draw_takes_memory_that_a_tape_would_not_keep() -> None:
    logits = torch.randn(2, 64)
    with Recording(Arena()) as recording:
        kernels.sample(logits, kernels.SampleBatch.greedy(2))
    assert recording.foreign == "sample"


def test_memory_grows_while_a_recording_is_open() -> None:
    arena = Arena()
    with Recording(arena) as recording:
        for size in (1 << 22, 1 << 23, 100):
            assert len(recording.scratch(str(size), size, torch.uint8)) == size
            assert torch.empty(size, dtype=torch.uint8).shape == (size,)
    assert recording.foreign is None


def test_memory_that_no_tensor_holds_serves_tensors_of_its_size() -> None:
    """Against a slow model: each byte has at most one owner."""
    arena, numbers, held = Arena(), random.Random(3), list[torch.Tensor]()
    for turn in range(300):
        if held and numbers.random() < 0.5:
            del held[numbers.randrange(len(held))]
        x = arena.empty((numbers.choice((1, 64, 65, 10_000, 90_000)),), torch.uint8)
        held.append(x.view(-1)[: len(x)])  # a view holds it as well as the tensor itself
        held = held[-12:]
        spans = sorted((x.data_ptr(), x.data_ptr() + len(x)) for x in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), turn
        assert all(start % 64 == 0 for start, _ in spans)
    assert arena.num_bytes == 1 << 22


def test_tensors_of_an_earlier_recording_free_no_memory_of_the_arena() -> None:
    arena = Arena()
    old = arena.empty((64,), torch.uint8)
    arena.restart()
    new = arena.empty((64,), torch.uint8)
    assert new.data_ptr() == old.data_ptr()
    del old
    assert arena.empty((64,), torch.uint8).data_ptr() != new.data_ptr()


def test_scratch_is_shared_by_name_and_other_memory_is_not_shared() -> None:
    recording = Recording(Arena())
    a, b = recording.scratch("a", 100, torch.float32), recording.scratch("a", 50, torch.float32)
    c = recording.scratch("c", 100, torch.float32)
    assert a.data_ptr() == b.data_ptr() != c.data_ptr()
    places = [recording.arena.empty((n,), torch.uint8) for n in (1, 63, 64, 65, 1 << 23, 5)]
    spans = sorted((x.data_ptr(), x.data_ptr() + len(x)) for x in places)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(x.data_ptr() % 64 == 0 for x in places)


def test_a_recording_does_not_load_torchs_compiler() -> None:
    program = """
import sys, torch
from phloem.kernels.cpu.recording import Arena, Recording
with Recording(Arena()) as recording:
    torch.empty(3).view(1, 3)
assert recording.foreign is None
print("torch._dynamo" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "False"
