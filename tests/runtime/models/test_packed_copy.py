"""A model made from the copy of its packed weights is the model made from its file, to the bit."""

import os
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.models import load_model, loading, packed_copy
from phloem.runtime.models.decoder import Model
from phloem.runtime.models.packed_copy import PackedCopy, copy_name, make_room
from phloem.runtime.planning.host import write_small_model
from phloem.tests.runtime.models.tiny import make_tiny_gguf

KINDS = {"": "Q4_1", "v_proj": "Q8_0", "norm": "F32"}  # queries and keys, and values, are two parts of one product


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHLOEM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(packed_copy, "MIN_BYTES", 1)
    return tmp_path / "home" / "packed"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tiny_gguf(tmp_path / "tiny.gguf", seed=1, kinds=KINDS)


def load(path: Path, **options: object) -> Model:
    return load_model(path, EngineConfig(model=str(path), **options))  # type: ignore[arg-type]


def products(model: Model) -> list[torch.Tensor]:
    """The results of all products for the same x."""
    found = []
    for layer in model.layers:
        for linear in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down):
            width = linear.parts[0].shape[1]
            found.append(linear(torch.linspace(-1, 1, 3 * width).view(3, width)))
    width = model.config.hidden_size
    return [*found, model.head(torch.linspace(-1, 1, 3 * width).view(3, width)), model.embedding.weight]


def the_copy(home: Path) -> Path:
    (found,) = home.iterdir()
    return found


@pytest.mark.parametrize("precision", ["auto", "int16"])
def test_a_later_load_packs_nothing_and_gives_the_same_bits(
    home: Path, path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = products(load(path, precision=precision))
    monkeypatch.delattr(loading, "stacked_linear")
    again = load(path, precision=precision)
    assert all(torch.equal(a, b) for a, b in zip(products(again), wanted, strict=True))


def test_repack_cache_false_keeps_no_copy_and_reads_none(home: Path, path: Path) -> None:
    load(path, repack_cache=False)
    assert not home.exists()
    load(path)
    the_copy(home).write_bytes(b"no copy")
    load(path, repack_cache=False)
    assert the_copy(home).read_bytes() == b"no copy"


def test_the_copy_can_be_written_later(home: Path, path: Path) -> None:
    later: list[Callable[[], None]] = []
    config = EngineConfig(model=str(path))
    load_model(path, config, later=later.append)
    assert not home.exists()
    for work in later:
        work()
    the_copy(home)
    load_model(path, config, later=later.append)
    assert len(later) == 1  # nothing new


def test_a_closed_engine_has_written_its_copy(home: Path, path: Path) -> None:
    write_small_model(path)
    EngineCore(EngineConfig(model=str(path), num_slots=64)).close()
    the_copy(home)


def test_floats_leave_no_copy(home: Path, path: Path) -> None:
    load(path, precision="float32")
    assert not home.exists()


def test_small_models_leave_no_copy(home: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_copy, "MIN_BYTES", 16 << 20)
    load(path)
    assert not home.exists()


def _damages() -> dict[str, object]:
    return {
        "cut off": lambda data: data[:-1],
        "too long": lambda data: data + b"\0",
        "empty": lambda data: b"",
        "only a beginning": lambda data: data[:40],
        "another header": lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        "a huge header": lambda data: data[:16] + b"\xff" * 8 + data[24:],
    }


@pytest.mark.parametrize("damage", _damages())
def test_a_damaged_copy_is_not_used_and_is_made_again(
    home: Path, path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = products(load(path))
    copy = the_copy(home)
    whole = copy.read_bytes()
    copy.write_bytes(_damages()[damage](whole))  # type: ignore[operator]
    assert all(torch.equal(a, b) for a, b in zip(products(load(path)), wanted, strict=True))
    assert "is not used, and made again" in caplog.text
    assert copy.read_bytes() == whole


def test_a_header_that_names_other_sizes_than_its_tensors_is_refused(
    home: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels read as many records as the shape says."""
    load(path)
    data = the_copy(home).read_bytes()
    size = int.from_bytes(data[16:24], "little")
    header = data[56 : 56 + size].replace(b'"bits":4', b'"bits":8', 1)
    digest = blake2b(header, digest_size=32).digest()
    the_copy(home).write_bytes(data[:24] + digest + header + data[56 + size :])
    assert PackedCopy(home, path, precision="auto").find("logits") is None
    assert "has records" in caplog.text


def test_the_name_changes_with_all_that_packed_weights_follow_from(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {copy_name(path, precision="auto"), copy_name(path, precision="int16")}
    with monkeypatch.context() as patch:
        patch.setattr(packed_copy, "sources_digest", lambda folder: b"changed source")
        names.add(copy_name(path, precision="auto"))
    other = next(one for one in packed_copy.isa.__globals__["ISAS"] if one.name != packed_copy.isa().name)
    with monkeypatch.context() as patch:
        patch.setattr(packed_copy, "isa", lambda: other)
        names.add(copy_name(path, precision="auto"))
    os.utime(path, (1, 1))
    names.add(copy_name(path, precision="auto"))
    assert len(names) == 5
    assert copy_name(path, precision="auto") in names


def test_engines_that_write_at_once_leave_one_whole_copy(home: Path, path: Path) -> None:
    wanted = products(load(path, repack_cache=False))
    copies = [PackedCopy(home, path, precision="auto") for _ in range(3)]
    model = load(path, repack_cache=False)
    start = threading.Barrier(3)

    def save(copy: PackedCopy) -> None:
        copy.keep("logits", model.head.parts)
        start.wait()
        copy.save()

    threads = [threading.Thread(target=save, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    the_copy(home)  # no unfinished file beside it
    assert PackedCopy(home, path, precision="auto").find("logits") is not None
    assert all(torch.equal(a, b) for a, b in zip(products(load(path)), wanted, strict=True))


def test_the_copies_that_were_not_used_for_the_longest_time_go_first(tmp_path: Path) -> None:
    for age, name in enumerate(["c.packed", "a.packed", "b.packed", "other"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (time.time() - age, time.time() - age))
    make_room(tmp_path, 250)
    assert {file.name for file in tmp_path.iterdir()} == {"a.packed", "c.packed", "other"}
    make_room(tmp_path, 99)
    assert {file.name for file in tmp_path.iterdir()} == {"other"}


def test_files_that_were_never_finished_are_deleted_later(tmp_path: Path) -> None:
    for name, age_s in (("new.unfinished", 0.0), ("old.unfinished", packed_copy.UNFINISHED_S + 1)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - age_s, time.time() - age_s))
    make_room(tmp_path, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["new.unfinished"]


def test_a_folder_that_cannot_be_written_costs_only_the_copy(
    home: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.parent.write_bytes(b"a file")
    assert products(load(path))
    assert "no copy of the packed weights" in caplog.text
