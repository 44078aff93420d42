"""Each rank has a GPU of its own, or the config is refused with the numbers that do not fit."""

from typing import Any

import pytest
import torch
from phloem.protocol.errors import InvalidParams, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.parallel.devices import on_device, refuse_devices, refuse_mixed


def test_rank_r_has_gpu_r_and_a_whole_model_the_device_that_was_named() -> None:
    split = EngineConfig(model="m", device="cuda", tensor_parallel=2, pipeline_parallel=2)
    assert [on_device(split, rank).device for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    for whole in (EngineConfig(model="m", device="cuda"), EngineConfig(model="m", device="cuda:1")):
        assert on_device(whole, 0) is whole
    assert on_device(EngineConfig(model="m", tensor_parallel=2), 1).device == "cpu"


@pytest.mark.parametrize(
    ("options", "count", "message"),
    [
        ({"tensor_parallel": 4}, 2, "tensor_parallel=4 is 4 ranks, each with a GPU of its own, but torch finds 2 CUDA"),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 4},
            7,
            "tensor_parallel=2 and pipeline_parallel=4 is 8 ranks, each with a GPU of its own, but torch finds 7",
        ),
        ({"sequence_parallel": 2, "device": "cuda:1"}, 8, "each rank has a GPU of its own, cuda:0 to cuda:1; set devi"),
        ({"tensor_parallel": 2, "expert_parallel": 2, "expert_copies": 1}, 2, "copies are made on CPUs only; set it"),
    ],
)
def test_what_the_machine_s_gpus_cannot_do_is_refused(
    options: dict[str, Any], count: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises((InvalidParams, Unsupported), match=message):
        refuse_devices(EngineConfig(**({"model": "m", "device": "cuda"} | options)))


def test_a_torch_without_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="m", device="cuda", tensor_parallel=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(Unsupported, match=r"tensor_parallel=2 with device='cuda': torch \d.* has no NCCL"):
        refuse_devices(config)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    refuse_devices(config)


def test_all_ranks_need_one_kind_of_device() -> None:
    refuse_mixed(["cpu", "cpu"])
    with pytest.raises(Unsupported, match="rank 2 has the device NVIDIA A100 .8.0., rank 0 NVIDIA H100 .9.0.: all"):
        refuse_mixed(["NVIDIA H100 (9.0)", "NVIDIA H100 (9.0)", "NVIDIA A100 (8.0)"])
