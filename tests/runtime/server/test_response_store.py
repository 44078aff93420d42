"""Stored responses: bounded in number, bytes and age, against a plain list; and an answer's own tokens in a prompt."""

import random

from phloem.runtime.config import StoreLimits
from phloem.runtime.server.response_store import ResponseStore, StoredResponse
from phloem.runtime.server.written import Written


def response(id: int, size: int, owner: bytes = b"me") -> StoredResponse:
    return StoredResponse(f"resp_{id}", owner, "string", b"x" * size, [], Written(["p"]))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_store_holds_what_a_plain_list_holds():
    rng = random.Random(0)
    for _ in range(50):
        limits = StoreLimits(max_count=rng.randint(1, 8), max_bytes=rng.randint(50, 400), lifetime_s=10)
        clock = Clock()
        store = ResponseStore(limits, now=clock)
        kept: list[tuple[float, StoredResponse]] = []
        for id in range(100):
            clock.now += rng.random() * 3
            if kept and rng.random() < 0.2:
                _, gone = kept.pop(rng.randrange(len(kept)))
                alive = clock.now - _ < limits.lifetime_s
                assert store.delete(gone.id, b"me") is alive
            new = response(id, rng.randint(1, 150))
            store.put(new)
            kept.append((clock.now, new))
            kept = [(at, one) for at, one in kept if clock.now - at < limits.lifetime_s]
            while len(kept) > limits.max_count or sum(one.size_bytes for _, one in kept) > limits.max_bytes:
                kept.pop(0)
            held = {one.id for _, one in kept}
            assert held == {f"resp_{i}" for i in range(id + 1) if store.get(f"resp_{i}", b"me") is not None}
            assert len(store) == len(held)


def test_another_owner_finds_nothing():
    store = ResponseStore(StoreLimits())
    store.put(response(1, 5))
    assert store.get("resp_1", b"you") is None and not store.delete("resp_1", b"you")
    assert store.get("resp_1", b"me") is not None and store.delete("resp_1", b"me")
    assert store.get("resp_1", b"me") is None and not store.delete("resp_1", b"me")


def test_an_answers_tokens_replace_its_text_where_the_template_writes_it():
    one = Written([(1,), "user\nhi", (2,), "assistant\n"]).with_answer("a b", (7, 8))
    parts = [(1,), "user\nhi", (2,), "assistant\na b", (2,), "user\nmore", (2,), "assistant\n"]
    assert one.is_in(parts)
    kept = [(1,), "user\nhi", (2,), "assistant\n", (7, 8), (2,), "user\nmore", (2,), "assistant\n"]
    assert one.kept_in(parts) == kept
    two = Written(parts, one.answers).with_answer("c", (9,))
    later = [*parts[:-1], "assistant\nc, and", (2,)]
    assert two.kept_in(later) == [*kept, (9,), ", and", (2,)]


def test_tokens_after_special_tokens_and_texts_that_are_written_otherwise():
    special = Written([(1, 3)]).with_answer("a", (7,))
    assert special.kept_in([(1, 3), "a", (2,)]) == [(1, 3), (7,), (2,)]
    assert special.kept_in([(1, 3)]) == [(1, 3)]
    assert special.kept_in([(1, 3), "b", (2,)]) == [(1, 3), "b", (2,)]
    assert not special.is_in([(1, 4), "a"]) and not special.is_in([])
    assert not Written(["x", (1,), "y"]).is_in(["x", (1,), (2,)])
    empty = Written(["p"]).with_answer("", ())
    assert empty.kept_in(["pq"]) == ["pq"]
