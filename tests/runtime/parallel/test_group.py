"""Collectives over gloo: three ranks, each a thread with a process group of its own."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from phloem.protocol.errors import Unsupported
from phloem.runtime.parallel.group import Alone, Distributed, Group, added, connect, links_of
from phloem.runtime.parallel.links import GlooLink, NcclLink
from phloem.runtime.parallel.lost import GangLost
from phloem.tests.runtime.parallel.process_groups import Coalesced
from phloem.tests.runtime.parallel.virtual import run_all

SIZE = 3
LONG = 100_001  # numbers: above it a sum is made in parts


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[Group]:
    folder = tmp_path_factory.mktemp("ranks")
    return at_once([lambda rank=rank: connect(folder, rank=rank, size=SIZE, timeout_s=60.0) for rank in range(SIZE)])


def at_once(calls: list[Any]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            found[i] = calls[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    failures = [one for one in found if isinstance(one, BaseException)]
    assert not failures, failures
    return found


def everyone(group: Group, dtype: torch.dtype, length: int) -> dict[str, Any]:
    """What one rank gets from each collective."""
    rank, size = group.rank, group.size
    rng = torch.Generator().manual_seed(rank)
    x = torch.randn(2, length // 2 + rank * 0, generator=rng).to(dtype)
    parts = [torch.full((4,), float(10 * rank + other)) for other in range(size)]
    into = [torch.empty(4) for _ in range(size)]
    group.exchange(parts, into)
    told = torch.full((5,), float(rank))
    group.broadcast(told, source=1)
    longer = torch.full((6,), float(rank))
    group.broadcast(longer[:2] if rank == 1 else longer, source=1)
    scattered = group.scatter(parts if rank == 2 else None, torch.empty(4), source=2)
    passed = torch.empty(3)
    if rank == 0:
        group.send(torch.arange(3.0), 1)
    elif rank == 1:
        group.receive(passed, 0)
    # Ranks 0 and 2 as a group, beside a transfer of all ranks that is under way.
    later = torch.empty(3)
    going = group.start_send(torch.full((3,), float(rank)), (rank + 1) % size)
    coming = group.start_receive(later, (rank - 1) % size)
    few = None
    if rank != 1:
        pair = group.part((2, 0))
        assert (pair.rank, pair.size) == ((1, 2) if rank == 0 else (0, 2))
        few = pair.sum(x)
    coming(), going()
    return {
        "later": later,
        "few": few,
        "sum": group.sum(x),
        "gather": torch.stack(group.gather(x)),
        "exchange": torch.stack(into),
        "broadcast": told,
        "shorter": longer,
        "scatter": scattered,
        "passed": passed if rank == 1 else None,
    }


@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 10), (torch.bfloat16, 10), (torch.float32, LONG)])
def test_processes_and_virtual_ranks_get_the_same_bits(gloo: list[Group], dtype: torch.dtype, length: int) -> None:
    expected = run_all(SIZE, lambda group: everyone(group, dtype, length))
    found = at_once([lambda group=group: everyone(group, dtype, length) for group in gloo])
    for rank in range(SIZE):
        for name, value in expected[rank].items():
            assert value is None or torch.equal(found[rank][name], value), (rank, name)
    assert all(torch.equal(one["sum"], found[0]["sum"]) for one in found)
    assert torch.equal(found[0]["sum"], added(list(found[0]["gather"])))
    assert [one["later"][0].item() for one in found] == [2.0, 0.0, 1.0]
    assert torch.equal(found[0]["few"], added([found[0]["gather"][2], found[0]["gather"][0]]))
    assert found[1]["exchange"][:, 0].tolist() == [1.0, 11.0, 21.0]
    assert found[0]["broadcast"].tolist() == [1.0] * 5 and found[0]["scatter"].tolist() == [20.0] * 4
    assert [one["shorter"].tolist() for one in found] == [[1.0] * 2 + [rank] * 4 for rank in (0.0, 1.0, 2.0)]
    assert found[1]["passed"].tolist() == [0.0, 1.0, 2.0]


def test_over_nccl_collectives_are_one_group_of_transfers_each(gloo: list[Group]) -> None:
    """With a stand-in for NCCL's process group, on which a lone transfer and one of a collective never meet."""
    coalesced = [Coalesced(process_group_of(group)) for group in gloo]
    groups = [Distributed({"cpu": NcclLink(one)}, rank=rank, size=SIZE) for rank, one in enumerate(coalesced)]
    expected = run_all(SIZE, lambda group: everyone(group, torch.float32, LONG))
    found = at_once([lambda group=group: everyone(group, torch.float32, LONG) for group in groups])
    for rank in range(SIZE):
        for name, value in expected[rank].items():
            assert value is None or torch.equal(found[rank][name], value), (rank, name)
    # Exchange, two broadcasts, scatter, gather, a sum of two ranks, and one of all in two parts.
    assert [one.num_together for one in coalesced] == [8, 7, 8]


def process_group_of(group: Group) -> Any:
    assert isinstance(group, Distributed)
    link = group.links["cpu"]
    assert isinstance(link, GlooLink)
    return link.process_group


def test_tensors_of_a_gpu_go_over_nccl_and_those_of_the_host_over_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class FakeNccl:
        class Options:
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            made.append((rank, size, vars(options)))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    store = torch.distributed.FileStore(str(tmp_path / "ranks"), 1)
    sizes = {"rank": 0, "size": 1, "timeout_s": 7.0}
    links = links_of(store, torch.device("cuda:0"), **sizes)
    assert isinstance(links["cuda"], NcclLink) and isinstance(links["cpu"], GlooLink)
    assert made == [(0, 1, {"_timeout": timedelta(seconds=7)})]
    assert list(links_of(store, torch.device("cpu"), **sizes)) == ["cpu"]


def test_ranks_with_different_devices_are_refused_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = iter(["NVIDIA H100 (9.0)", "NVIDIA A100 (8.0)"])
    monkeypatch.setattr("phloem.runtime.parallel.group.kind_of", lambda _: next(kinds))

    def refusal(rank: int) -> str:
        with pytest.raises(Unsupported) as error:
            connect(tmp_path, rank=rank, size=2, timeout_s=60.0)
        return str(error.value)

    first, second = at_once([lambda rank=rank: refusal(rank) for rank in (0, 1)])
    assert first == second
    assert "rank 1 has the device NVIDIA" in first and "all ranks need the same kind; choose the GPUs with" in first


def test_a_sum_of_bfloat16_is_rounded_once() -> None:
    ones = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    assert added([x.view(1) for x in ones]).item() == 258.0  # rounded after each addition it would stay 256


def test_a_rank_that_is_silent_is_lost_after_the_timeout_and_later_calls_fail_at_once(tmp_path: Path) -> None:
    first, _second = at_once([lambda rank=rank: connect(tmp_path, rank=rank, size=2, timeout_s=0.3) for rank in (0, 1)])
    with pytest.raises(GangLost, match="rank 0 of 2 lost another rank: Timed out waiting 300ms"):
        first.receive(torch.empty(1), 1)
    with pytest.raises(GangLost, match="rank 0 of 2 lost another rank"):
        first.broadcast(torch.empty(1))


def test_one_rank_needs_no_other(tmp_path: Path) -> None:
    alone = connect(tmp_path, rank=0, size=1, timeout_s=1.0)
    assert isinstance(alone, Alone) and not isinstance(alone, Distributed)
    x = torch.arange(3.0)
    assert alone.sum(x) is x and alone.gather(x) == [x]
    assert torch.equal(alone.scatter([x], torch.empty(3)), x)
    with pytest.raises(ValueError, match="has no other"):
        alone.send(x, 1)
