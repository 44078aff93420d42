import random

from phloem.constrained.machine.recent import DROPPED_AT_ONCE, Recent, RecentByNumber


def test_the_last_entries_are_kept_and_never_more_than_twice_as_many() -> None:
    recent: Recent[int, str] = Recent(4)
    for i in range(100):
        recent.put(i, str(i))
        assert all(recent.get(j) == str(j) for j in range(max(0, i - 3), i + 1))
        assert len(recent.young) + len(recent.old) <= 8
    assert recent.get(50) is None


def test_an_entry_that_is_asked_for_stays() -> None:
    recent: Recent[int, str] = Recent(2)
    recent.put(-1, "used")
    for i in range(50):
        recent.put(i, "")
        assert recent.get(-1) == "used"


def test_numbers_are_kept_as_other_keys_are() -> None:
    recent: Recent[int, int] = Recent(1000)
    parted: RecentByNumber[int] = RecentByNumber(1000)
    rng = random.Random(3)
    for _ in range(20_000):
        key = rng.randrange(6000)
        assert parted.get(key) == recent.get(key)
        if rng.random() < 0.7:
            value = rng.randrange(100)
            recent.put(key, value)
            parted.put(key, value)


def test_what_is_not_kept_is_dropped_a_few_entries_at_a_time() -> None:
    dropped: list[int] = []

    class Entry:
        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            dropped.append(self.number)

    for recent in (Recent[int, Entry](1000), RecentByNumber[Entry](1000)):
        dropped.clear()
        for i in range(10_000):
            before = len(dropped)
            recent.put(i, Entry(i))
            assert len(dropped) - before <= DROPPED_AT_ONCE
            assert len(recent.leaving) <= 1000
        assert len(dropped) >= 7000


def test_what_is_forgotten_is_not_found_and_dropped_later() -> None:
    recent: Recent[int, int] = Recent(10)
    for i in range(15):
        recent.put(i, i)
    recent.forget()
    assert all(recent.get(i) is None for i in range(15)) and len(recent.leaving) == 15
    for i in range(5):
        recent.put(100 + i, i)
    assert len(recent.leaving) == 0 and recent.get(104) == 4
