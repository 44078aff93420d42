"""KV that is evicted and restored: from host memory, from files, after a restart."""

import logging
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from phloem.radix_cache import FolderStore, HostTier, RadixCache, StoreTier, Tiers, block_names
from phloem.tests.radix_cache.tiered import BLOCK_BYTES, BLOCK_LEN, Engine, text


def disk_tier(folder: Path, **options) -> StoreTier:
    return StoreTier(FolderStore(folder), **({"format": "test", "max_bytes": 1 << 20} | options))


def path_of(disk: StoreTier, name: bytes) -> Path:
    return disk.store.folder / disk.key_of(name)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_evicted_blocks_are_restored_from_host_memory():
    engine = Engine(12)
    assert engine.run(text(0, 10)) == 10
    assert engine.run(text(50, 10)) == 10
    assert engine.cache.peek(text(0, 10)) < 4
    assert engine.run(text(0, 10)) == 2  # two whole blocks are restored, two tokens computed
    assert engine.tiers.counters.restored == 2


def test_without_eviction_only_write_behind_saves_blocks():
    engine = Engine(40)
    engine.run(text(0, 12))
    assert engine.tiers.counters.saved == 0
    assert engine.tiers.write_behind(2) == 2
    assert engine.tiers.write_behind(2) == 1
    assert engine.tiers.write_behind(2) == 0


def test_a_block_that_is_saved_is_not_saved_again_on_eviction():
    engine = Engine(12)
    engine.run(text(0, 12))
    engine.tiers.write_behind(10)
    engine.run(text(50, 12))
    assert engine.tiers.counters.saved == 3


def test_a_block_that_left_the_host_tier_is_saved_again():
    engine = Engine(8, host_blocks=2)
    for _ in range(3):
        engine.run(text(0, 8))
        engine.run(text(50, 8))
    assert engine.run(text(0, 8)) == 0


def test_blocks_are_not_copied_when_computing_is_faster():
    engine = Engine(8)
    engine.tiers.clock = time.perf_counter
    engine.tiers.recompute_s_per_token = 0.0  # less than any copy takes
    for _ in range(3):
        engine.run(text(0, 8))
        engine.run(text(50, 8))
    assert engine.tiers.counters.refused > 0


def test_a_match_inside_a_block_is_completed_from_the_block():
    engine = Engine(40)
    engine.run(text(0, 12))
    engine.tiers.write_behind(10)
    other = engine.cache.acquire(text(90, 1))
    other.extend(40 - 6)
    assert engine.cache.peek(text(0, 12)) == 6
    other.release()
    held = engine.cache.acquire(text(0, 6))
    slots = held.slot_ids.copy()
    assert engine.run(text(0, 12)) == 0
    assert (held.slot_ids == slots).all()


def test_restore_obeys_its_limit_and_the_rest_stays_in_the_tree():
    engine = Engine(12)
    engine.run(text(0, 12))
    engine.run(text(50, 12))
    assert engine.run(text(0, 12), limit=11) == 1
    assert engine.cache.peek(text(0, 12)) == 12


def test_restore_takes_no_more_slots_than_are_free_or_evictable():
    engine = Engine(12)
    engine.run(text(0, 12))
    engine.run(text(50, 12))
    held = engine.cache.acquire(text(50, 5))
    lease = engine.cache.acquire(text(0, 12))
    assert engine.cache.restore(lease, text(0, 12)) == 4
    engine.cache.check()
    assert held.num_slots == 5


def test_a_load_that_fails_leaves_the_lease_as_it_was():
    engine = Engine(12)
    engine.run(text(0, 12))
    engine.run(text(50, 12))
    for name in block_names(text(0, 12), block_len=BLOCK_LEN):
        engine.tiers.host.put(name, b"short")
    lease = engine.cache.acquire(text(0, 12))
    with pytest.raises(ValueError, match="buffer size"):
        engine.cache.restore(lease, text(0, 12))
    assert lease.num_slots == 0
    engine.cache.check()


def test_namespaces_stay_apart_in_the_tiers():
    engine = Engine(12)
    engine.run(text(0, 12), namespace="a")
    engine.run(text(50, 12))
    assert engine.run(text(0, 12), namespace="b") == 12
    assert engine.run(text(0, 12), namespace="a") == 0


def test_a_flush_of_the_cache_saves_no_block():
    engine = Engine(12)
    engine.run(text(0, 12))
    engine.cache.flush()
    assert engine.tiers.counters.saved == 0
    assert engine.run(text(0, 12)) == 12


def test_a_restart_finds_its_prefixes_again(tmp_path):
    engine = Engine(40, disk=disk_tier(tmp_path))
    engine.run(text(0, 30))
    engine.tiers.flush()
    engine.tiers.close()
    assert len(files(tmp_path)) == 7
    again = Engine(40, disk=disk_tier(tmp_path))
    assert again.run(text(0, 30)) == 2
    assert again.tiers.counters.read == 7
    again.tiers.close()


def test_two_engines_share_a_folder_while_they_run(tmp_path):
    one, two = (Engine(12, disk=disk_tier(tmp_path)) for _ in range(2))
    one.run(text(0, 12))
    one.tiers.flush()
    assert two.run(text(0, 12)) == 0
    two.tiers.flush()
    assert two.tiers.counters.saved == 0
    one.tiers.close()
    two.tiers.close()


def test_another_format_reads_no_block(tmp_path):
    engine = Engine(12, disk=disk_tier(tmp_path))
    engine.run(text(0, 12))
    engine.tiers.flush()
    other = Engine(12, disk=disk_tier(tmp_path, format="other"))
    assert other.run(text(0, 12)) == 12
    engine.tiers.close()
    other.tiers.close()


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


SPOILERS = {
    "a flipped bit of KV": lambda path: flip(path, -1),
    "a flipped bit of the checksum": lambda path: flip(path, 60),
    "a cut file": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "a longer file": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "an empty file": lambda path: path.write_bytes(b""),
    "a foreign file": lambda path: path.write_bytes(b"GIF89a" * 40),
    "another block's file": lambda path: path.write_bytes(files(path.parents[2])[0].read_bytes()),
}


@pytest.mark.parametrize("spoil", SPOILERS.values(), ids=SPOILERS.keys())
def test_a_file_that_does_not_verify_is_logged_once_ignored_and_replaced(tmp_path, caplog, spoil):
    engine = Engine(12, disk=disk_tier(tmp_path))
    engine.run(text(0, 12))
    engine.tiers.flush()
    engine.tiers.close()
    names = block_names(text(0, 12), block_len=BLOCK_LEN)
    spoiled = max(names)  # the last by name: not the file used as "another block"
    spoil(next(tmp_path.rglob(f"{spoiled.hex()}.kv")))

    again = Engine(12, disk=disk_tier(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert again.run(text(0, 12)) == 12 - BLOCK_LEN * names.index(spoiled)
        again.cache.flush()
        assert again.run(text(0, 12)) == 12 - BLOCK_LEN * names.index(spoiled)
    (record,) = caplog.records
    assert f"kv block {spoiled.hex()} ignored" in record.getMessage()
    again.tiers.flush()
    assert spoiled in again.tiers.store
    again.tiers.close()
    last = Engine(12, disk=disk_tier(tmp_path))
    assert last.run(text(0, 12)) == 0
    last.tiers.close()


def test_the_disk_tier_keeps_its_size_and_drops_the_least_recently_used(tmp_path):
    size = 18 + 3 * 16 + BLOCK_BYTES
    disk = disk_tier(tmp_path, max_bytes=10 * size)
    names = [bytes([i]) * 16 for i in range(11)]
    for age, name in enumerate(names[:10]):
        disk.write(name, bytes(BLOCK_BYTES))
        os.utime(path_of(disk, name), (1000 + age, 1000 + age))
    assert disk.size_bytes == 10 * size
    assert disk.read(names[0]) == bytes(BLOCK_BYTES)
    disk.write(names[10], bytes(BLOCK_BYTES))
    assert [i for i, name in enumerate(names) if name in disk] == [0, *range(3, 11)]
    assert disk.size_bytes == 9 * size == disk_tier(tmp_path).size_bytes


def test_a_disk_error_is_logged_and_changes_nothing_else(tmp_path, caplog):
    disk = disk_tier(tmp_path)
    engine = Engine(12, disk=disk)
    folder = path_of(disk, block_names(text(0, 4), block_len=4)[0]).parent
    folder.parent.mkdir()
    folder.write_text("in the way")
    engine.run(text(0, 4))
    with caplog.at_level(logging.WARNING):
        engine.tiers.flush()
    assert "not written" in caplog.text
    assert engine.tiers.counters.written == 0
    engine.tiers.close()


def test_a_slow_disk_drops_writes_and_does_not_block(tmp_path, monkeypatch):
    gate = threading.Event()
    disk = disk_tier(tmp_path)
    monkeypatch.setattr(disk, "write", lambda name, block: gate.wait(300))
    tiers = Tiers(
        save=lambda slots: [bytes(BLOCK_BYTES)] * len(slots),
        load=lambda slots, blocks: None,
        host=HostTier(1000),
        store=disk,
        block_len=BLOCK_LEN,
        max_queued=2,
    )
    cache = RadixCache(100, tiers=tiers, block_len=BLOCK_LEN)
    lease = cache.acquire(text(0, 80))
    lease.extend(80)
    lease.commit(text(0, 80))
    assert tiers.write_behind(100) == 20
    assert tiers.counters.dropped >= 17
    gate.set()
    tiers.close()


def test_the_host_tier_keeps_its_size_and_the_most_recently_used_blocks():
    host = HostTier(30)
    for name in (b"a", b"b", b"c"):
        host.put(name, bytes(10))
    assert host.get(b"a") == bytes(10)
    host.put(b"d", bytes(10))
    assert [name in host for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    host.put(b"a", bytes(5))
    host.put(b"e", bytes(31))
    assert (b"e" not in host) and host.size_bytes == 25 and len(host) == 3


def test_random_requests_over_all_tiers_never_see_wrong_kv(tmp_path):
    draw = random.Random(0)
    stems = [text(0, 40), np.r_[text(0, 14), text(70, 26)].astype(np.int32), text(200, 40)]
    computed = total = 0
    for restart in range(4):
        engine = Engine(48, disk=disk_tier(tmp_path, max_bytes=4000), host_blocks=5)
        for _ in range(60):
            tokens = draw.choice(stems)[: draw.randint(1, 40)].copy()
            tokens[draw.randrange(len(tokens)) :] += draw.choice((0, 0, 1000))
            computed += engine.run(tokens, limit=len(tokens) - 1)
            total += len(tokens)
            if draw.random() < 0.2:
                engine.tiers.write_behind(draw.randint(0, 5))
        assert engine.tiers.counters.restored > 0
        if restart % 2:
            engine.tiers.flush()
        engine.tiers.close()
    assert computed < total // 2


def test_blocks_of_another_length_are_refused():
    with pytest.raises(ValueError, match="block_len=64, but the tiers keep blocks of 4 tokens"):
        RadixCache(10, tiers=Engine(10).tiers)


@pytest.mark.parametrize("tier", [HostTier, lambda max_bytes: disk_tier(Path(os.devnull).parent, max_bytes=max_bytes)])
def test_a_tier_without_room_is_refused(tier):
    with pytest.raises(ValueError, match="max_bytes=0"):
        tier(max_bytes=0)
