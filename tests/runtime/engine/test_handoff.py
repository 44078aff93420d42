"""KV that one engine lends and another copies: answers stay equal, and both sides forget it in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import InternalError
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.engine_socket import EngineSocket
from phloem.tests.runtime.engine.driver import CLIENT, Driver
from phloem.tests.runtime.wire import RawEngine, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, speculative=False)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, speculative=False)
PROMPT = "the sap rises and the leaves fall " * 12  # 408 tokens: six whole blocks


class Clock:
    """Stands still until it is moved."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Side(Driver):
    """One of two engines. What its own client asks for is driven; other engines reach it at ``url``."""

    def __init__(self, engine: EngineCore, url: str) -> None:
        super().__init__(engine)
        self._socket = EngineSocket(url, engine.welcome())
        self.url = url
        self.num_fetched = 0

    def exchange(self, inbox: list[tuple[bytes, m.ClientMessage]]) -> list[tuple[bytes, m.RuntimeMessage]]:
        others = self._socket.receive(0.0)
        self.num_fetched += sum(len(message.names) for _, message in others if isinstance(message, m.Fetch))
        outbox = self.engine.step([*inbox, *others])
        self._socket.send([(client, message) for client, message in outbox if client != CLIENT])
        return [(client, message) for client, message in outbox if client == CLIENT]

    def close(self) -> None:
        self._socket.close()


def step_until(step: Callable[[], None], holds: Callable[[], bool]) -> None:
    """For what steps bring about, which need no pause between them as those do that wait for another thread."""
    for _ in range(2000):
        if holds():
            return
        step()
    raise AssertionError("it did not become true")


class Pair:
    """``lender`` and ``borrower`` take steps in turn, on one clock and one thread."""

    def __init__(self, engines: tuple[EngineCore, EngineCore], clock: Clock, folder: Path) -> None:
        self.lender = Side(engines[0], f"ipc://{folder}/lender")
        self.borrower = Side(engines[1], f"ipc://{folder}/borrower")
        self.clock = clock

    def step(self) -> None:
        self.lender.step()
        self.borrower.step()

    def ask(self, side: Side, message: m.ClientMessage) -> m.Answer:
        side.say(message)

        def answered() -> bool:
            self.step()
            return bool(side.answers)

        wait_until(answered)
        return side.answers.pop()

    def export(self, program: str, *, ttl_s: float = 5.0, grant: str = "") -> m.Grant:
        answer = self.ask(self.lender, m.Export(1, program, ttl_s, grant))
        assert answer.error is None, answer.error
        assert isinstance(answer.value, m.Grant)
        return answer.value

    def copy(self, grant: m.Grant, *, url: str = "") -> m.Imported:
        answer = self.ask(self.borrower, m.Import(2, grant, url or self.lender.url))
        assert answer.error is None, answer.error
        assert isinstance(answer.value, m.Imported)
        return answer.value

    def run_on_lender(self, ops: list[o.AnyOp], *, program: str = "a", num_deltas: int = 0) -> None:
        """Submit ``ops`` and step until its generation has ended, or has streamed ``num_deltas``."""
        found = self.lender.submit(ops, program=program)

        def is_there() -> bool:
            return len(found.deltas) >= num_deltas if num_deltas else ops[-1].op in found.done

        step_until(self.lender.step, is_there)


@pytest.fixture(scope="module")
def engines(tiny_model_path: Path) -> Iterator[tuple[EngineCore, EngineCore, Clock]]:
    clock = Clock()
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=4096, num_threads=1)
    found = EngineCore(config, clock=clock), EngineCore(config, clock=clock)
    yield *found, clock
    for engine in found:
        engine.close()


@pytest.fixture
def pair(engines: tuple[EngineCore, EngineCore, Clock], tmp_path: Path) -> Iterator[Pair]:
    """With empty caches. Once all grants and imports have expired, no slot may be locked."""
    found = Pair(engines[:2], engines[2], tmp_path)
    yield found
    engines[2].now_s += 5.0
    for side in (found.lender, found.borrower):
        side.close()
        side.engine.drop_client(CLIENT)
        side.engine.check()
        assert side.engine.cache.num_evictable == side.engine.cache.num_cached and not side.engine.has_work
        side.engine.cache.flush()


def ops_of(text: str = PROMPT, params: SamplingParams = GREEDY, *, closes: bool = False) -> list[o.AnyOp]:
    """Without a close the sequence stays open, as that of a program that waits for its own Python."""
    ops: list[o.AnyOp] = [o.Text(op=0, seq=0, text=text), o.Gen(op=1, seq=0, params=params, stream=True)]
    return [*ops, o.Close(op=2, seq=0)] if closes else ops


def answer_of(driver: Driver, ops: list[o.AnyOp]) -> tuple[tuple[int, ...], int]:
    """The tokens of the generation, and how many of its prompt's tokens were computed."""
    meta = driver.run(ops).done[1].meta
    assert isinstance(meta, m.GenMeta)
    return meta.candidates[0].token_ids, meta.prompt_tokens - meta.cached_tokens


# -- copies -----------------------------------------------------------------------------------------------------------


def test_a_copied_prefix_is_found_and_answers_are_equal(pair: Pair) -> None:
    want, num_computed = answer_of(pair.borrower, ops_of(closes=True))
    assert num_computed > 400
    pair.borrower.engine.cache.flush()
    pair.run_on_lender(ops_of())
    grant = pair.export("a")
    assert len(grant.names) == 6 and len(grant.prefixes) == 1 and grant.ttl_s == 5.0
    assert pair.copy(grant) == m.Imported(held=6, fetched=6)
    assert answer_of(pair.borrower, ops_of(closes=True)) == (want, num_computed - 6 * 64)


def test_what_was_generated_is_copied_while_the_program_decodes_on(pair: Pair) -> None:
    """Each further export has what was computed since, and only that travels."""
    want, _ = answer_of(pair.borrower, ops_of(params=LONG, closes=True))
    pair.borrower.engine.cache.flush()
    pair.run_on_lender(ops_of(params=LONG, closes=True), num_deltas=20)
    first = pair.export("a")
    assert pair.copy(first).fetched == len(first.names) >= 6
    running = pair.lender.outcomes["a"]
    step_until(pair.step, lambda: len(running.deltas) > 150 or 1 in running.done)
    assert 1 not in running.done, "it still decodes"
    second = pair.export("a", grant=first.id)
    assert second.id == first.id and len(second.names) >= len(first.names) + 2
    copied = pair.copy(second)
    assert copied.held == len(second.names) and copied.fetched == len(second.names) - len(first.names)
    tokens, num_computed = answer_of(pair.borrower, ops_of(params=LONG, closes=True))
    assert tokens == want and num_computed < 64
    pair.lender.run()
    assert running.done[1].meta.candidates[0].token_ids == want


def test_forks_share_their_blocks_in_a_grant(pair: Pair) -> None:
    ops: list[o.AnyOp] = [o.Text(op=0, seq=0, text=PROMPT), o.Fork(op=1, seq=0, children=(1, 2))]
    for child in (1, 2):
        ops += [
            o.Text(op=10 * child, seq=child, text=f" branch {child} " * 12),
            o.Gen(op=10 * child + 1, seq=child, params=GREEDY),
        ]
    want = pair.borrower.run([*ops, *(o.Close(op=90 + seq, seq=seq) for seq in range(3))])
    pair.borrower.engine.cache.flush()
    pair.lender.run(ops, program="a")
    grant = pair.export("a")
    assert len(grant.prefixes) == 2, "the parent's tokens begin both"
    names = [name for prefix in grant.prefixes for name in prefix.names]
    assert len(grant.names) == len(names) - 6
    assert pair.copy(grant) == m.Imported(held=len(grant.names), fetched=len(grant.names))
    assert pair.lender.num_fetched == len(grant.names), "a shared block travels once"
    found = pair.borrower.run([*ops, *(o.Close(op=90 + seq, seq=seq) for seq in range(3))])
    for op in (11, 21):
        assert found.value(op) == want.value(op)
        meta = found.done[op].meta
        assert isinstance(meta, m.GenMeta) and meta.prompt_tokens - meta.cached_tokens < 64


def test_two_equal_programs_that_run_at_once_are_both_exported(pair: Pair) -> None:
    """The second one's tokens are in the tree already, in other slots than its own."""
    pair.lender.submit(ops_of(params=LONG), program="b")
    pair.run_on_lender(ops_of(params=LONG), num_deltas=100)
    first, second = pair.export("a"), pair.export("b")
    assert first.id != second.id and set(second.names) <= set(first.names) | set(pair.export("a").names)
    pair.lender.run()
    answers = [pair.lender.outcomes[name].done[1].meta for name in "ab"]
    assert answers[0].candidates[0].token_ids == answers[1].candidates[0].token_ids


def test_an_export_can_wait_for_the_first_token(pair: Pair) -> None:
    """The grant then has every whole block of the prompt, and the tokens drawn so far."""
    found = pair.lender.submit(ops_of(params=LONG, closes=True), program="a")
    pair.lender.say(m.Export(1, "a", when_drawing=True))
    step_until(pair.lender.step, lambda: bool(pair.lender.answers))
    grant = pair.lender.answers.pop().value
    assert len(grant.names) == 6 and len(found.deltas) < 5
    ((drawn,),) = grant.drawn.values()
    pair.lender.run()
    assert 1 <= len(drawn) < 8 and tuple(drawn) == found.done[1].meta.candidates[0].token_ids[: len(drawn)]


def test_an_export_that_waits_is_answered_when_its_program_ends(pair: Pair) -> None:
    pair.lender.submit(ops_of()[:1], program="a")
    pair.lender.say(m.Export(1, "a", when_drawing=True))
    for _ in range(3):
        pair.lender.step()
    assert not pair.lender.answers and not pair.lender.engine.has_work
    pair.lender.say(m.Cancel("a"))
    step_until(pair.lender.step, lambda: bool(pair.lender.answers))
    assert "program 'a' does not run here" in pair.lender.answers.pop().error.message


# -- grants end -------------------------------------------------------------------------------------------------------


def test_a_grant_that_nobody_fetches_expires_and_its_slots_are_evictable(pair: Pair) -> None:
    pair.run_on_lender(ops_of())
    grant = pair.export("a", ttl_s=5.0)
    pair.lender.engine.drop_client(CLIENT)
    cache = pair.lender.engine.cache
    pair.clock.now_s += 4.9
    assert cache.num_locked == 6 * 64 and len(pair.lender.engine.handoff.grants) == 1
    pair.clock.now_s += 0.2
    assert cache.num_evictable == cache.num_cached and len(pair.lender.engine.handoff.grants) == 0
    copied = pair.copy(grant)
    assert copied.fetched == 0 and f"grant {grant.id!r} is not there" in copied.why


def test_a_fetch_renews_a_grant_and_its_end_unpins_at_once(pair: Pair) -> None:
    pair.run_on_lender(ops_of())
    grant = pair.export("a")
    pair.lender.engine.drop_client(CLIENT)
    cache = pair.lender.engine.cache
    for _ in range(3):
        pair.clock.now_s += 4.0
        answer = pair.ask(pair.lender, m.Fetch(3, grant.id, list(grant.names)[:1]))
        assert answer.error is None and cache.num_locked == 6 * 64
    pair.lender.say(m.EndGrant(grant.id))
    pair.lender.step()
    assert cache.num_locked == 0


def test_an_import_is_kept_for_its_time_and_no_longer(pair: Pair) -> None:
    pair.run_on_lender(ops_of())
    pair.copy(pair.export("a"))
    cache = pair.borrower.engine.cache
    assert cache.num_locked == 6 * 64
    assert cache.flush() == 0 and cache.num_cached == 6 * 64
    pair.clock.now_s += 5.0
    assert cache.num_evictable == cache.num_cached == 6 * 64
    pair.borrower.engine.check()


def test_a_granted_block_goes_where_a_sequence_needs_its_slots(tiny_model_path: Path, tmp_path: Path) -> None:
    """A pin does not keep a sequence from running; the borrower computes what is gone."""
    clock = Clock()
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=1024, num_threads=1)
    engine, other = EngineCore(config, clock=clock), EngineCore(config, clock=clock)
    pair = Pair((engine, other), clock, tmp_path)
    pair.run_on_lender(ops_of())
    grant = pair.export("a", ttl_s=60.0)
    engine.drop_client(CLIENT)
    text = "another prompt that takes nearly every slot of this small engine: " * 14
    assert len(answer_of(pair.lender, ops_of(text, closes=True))[0]) == 12
    copied = pair.copy(grant)
    assert copied.fetched < 6 and "has not kept block" in copied.why
    tokens, _ = answer_of(pair.borrower, ops_of(closes=True))
    pair.lender.engine.cache.flush()
    assert tokens == answer_of(pair.lender, ops_of(closes=True))[0]
    for side in (pair.lender, pair.borrower):
        side.close()
        side.engine.close()


# -- faults -----------------------------------------------------------------------------------------------------------


@contextmanager
def false_lender(folder: Path, reply: Callable[[m.Fetch], object]) -> Iterator[str]:
    """An engine that answers each fetch with what ``reply`` makes of it; None: not at all."""
    engine = RawEngine(f"ipc://{folder}/false")

    def serve() -> None:
        engine.welcome()
        while isinstance(message := engine.hear(m.Fetch | m.Bye), m.Fetch):
            value = reply(message)
            if value is not None:
                engine.say(m.Answer(message.id, value))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield engine.url
    finally:
        thread.join()
        engine.close()


FAULTS = {
    "corrupt": lambda blocks: [*blocks[:1], blocks[1][:-1] + bytes([blocks[1][-1] ^ 1]), *blocks[2:]],
    "short": lambda blocks: [blocks[0], blocks[1][:-64], *blocks[2:]],
    "another block": lambda blocks: [blocks[0], blocks[2], *blocks[2:]],
    "too few": lambda blocks: blocks[:1],
    "no list": lambda blocks: "nonsense",
    "no bytes": lambda blocks: [blocks[0], 5, *blocks[2:]],
    "gone": lambda blocks: [blocks[0], b"", *blocks[2:]],
    "late": lambda blocks: None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_block_that_is_not_sound_is_computed_again(pair: Pair, tmp_path: Path, fault: str) -> None:
    want, num_computed = answer_of(pair.borrower, ops_of(closes=True))
    pair.borrower.engine.cache.flush()
    pair.run_on_lender(ops_of())
    grant = pair.export("a")
    sound = pair.ask(pair.lender, m.Fetch(3, grant.id, list(grant.names))).value
    by_name = dict(zip(grant.names, sound, strict=True))
    with false_lender(tmp_path, lambda fetch: FAULTS[fault]([by_name[name] for name in fetch.names])) as url:
        copied = pair.copy(grant, url=url)
    assert copied.fetched == 0 and copied.why, "nothing of an answer with a fault is used"
    assert answer_of(pair.borrower, ops_of(closes=True)) == (want, num_computed)


def test_a_lender_that_is_not_there_costs_the_import_alone(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phloem.runtime.engine.handoff.CONNECT_S", 0.2)  # however long it waits, nobody comes
    pair.run_on_lender(ops_of())
    copied = pair.copy(pair.export("a"), url=f"ipc://{tmp_path}/nobody")
    assert copied.fetched == 0 and "nothing answers at ipc://" in copied.why


def test_an_import_ends_with_the_client_that_asked_for_it(pair: Pair, tmp_path: Path) -> None:
    pair.run_on_lender(ops_of())
    grant = pair.export("a")
    asked = threading.Event()

    def hold(fetch: m.Fetch) -> None:
        asked.set()

    with false_lender(tmp_path, hold) as url:
        pair.borrower.say(m.Import(2, grant, url))
        wait_until(lambda: (pair.borrower.step(), asked.is_set())[1])
        assert pair.borrower.engine.has_work
        pair.borrower.engine.drop_client(CLIENT)
        assert not pair.borrower.engine.has_work and pair.borrower.engine.cache.num_cached == 0


def test_a_fault_of_a_step_answers_imports_and_ends_grants(pair: Pair, tmp_path: Path) -> None:
    pair.run_on_lender(ops_of())
    grant = pair.export("a")
    with false_lender(tmp_path, lambda fetch: None) as url:
        pair.borrower.say(m.Import(2, grant, url))
        pair.borrower.step()
        outbox = pair.borrower.engine.fail_all(InternalError("a step failed"))
    assert [message.error.message for _, message in outbox] == ["a step failed"] and not pair.borrower.engine.has_work
    pair.lender.engine.fail_all(InternalError("a step failed"))
    assert len(pair.lender.engine.handoff.grants) == 0 and pair.lender.engine.cache.num_locked == 0


# -- refusals ---------------------------------------------------------------------------------------------------------


def changed(grant: m.Grant, **changes: object) -> m.Grant:
    prefix = {key: changes.pop(key) for key in ("tokens", "names") if key in changes}
    if prefix:
        changes["prefixes"] = [msgspec.structs.replace(grant.prefixes[0], **prefix)]
    return msgspec.structs.replace(grant, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"format": bytes(16)}, "of another model, precision, number format"),
        (lambda g: {"block_len": 32}, "of another model, precision, number format"),
        (lambda g: {"adapter": "loud"}, "adapter 'loud' is not loaded; there are none"),
        (lambda g: {"tokens": g.prefixes[0].tokens[:-4]}, "has 1,532 bytes of tokens for 6 blocks of 64 tokens"),
        (lambda g: {"tokens": b"\xff" * len(g.prefixes[0].tokens)}, "has tokens beyond the vocabulary"),
        (lambda g: {"tokens": bytes(len(g.prefixes[0].tokens))}, "its names are not those of its tokens"),
        (lambda g: {"namespace": "another tenant's"}, "its names are not those of its tokens"),
    ],
)
def test_a_grant_of_other_kv_is_refused_by_name(
    pair: Pair, change: Callable[[m.Grant], dict[str, object]], message: str
) -> None:
    pair.run_on_lender(ops_of())
    grant = pair.export("a")
    answer = pair.ask(pair.borrower, m.Import(2, changed(grant, **change(grant)), pair.lender.url))
    assert answer.error is not None and message in answer.error.message, answer


def test_what_cannot_be_lent_is_refused_by_name(pair: Pair, start: Callable[..., Driver]) -> None:
    answer = pair.ask(pair.lender, m.Export(1, "nobody"))
    assert answer.error is not None and "program 'nobody' does not run here" in answer.error.message
    pair.run_on_lender(ops_of())
    grant = pair.export("a")
    answer = pair.ask(pair.lender, m.Fetch(1, grant.id, [bytes(16)] * 3000))
    assert answer.error is not None and answer.error.kind == "LimitExceeded", answer
    without = start(prefix_cache=False)
    assert "handoff" not in without.engine.welcome().capabilities
    assert "handoff" in pair.lender.engine.welcome().capabilities
    without.say(m.Import(5, grant, pair.lender.url))
    without.step()
    assert without.answers[0].error.message == "this engine hands over no KV: it keeps no cached prefixes"


def test_an_import_takes_no_slots_from_running_sequences(tiny_model_path: Path, tmp_path: Path) -> None:
    clock = Clock()
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_threads=1)
    engines = tuple(
        EngineCore(msgspec.structs.replace(config, num_slots=num_slots), clock=clock) for num_slots in (2048, 512)
    )
    pair = Pair(engines, clock, tmp_path)
    pair.run_on_lender(ops_of())
    running = pair.borrower.submit(ops_of("short ", LONG, closes=True), program="b")
    step_until(pair.borrower.step, lambda: bool(running.deltas))
    copied = pair.copy(pair.export("a"))
    assert copied.held <= 6
    pair.borrower.run()
    assert len(running.done[1].meta.candidates[0].token_ids) == 200
    for side in (pair.lender, pair.borrower):
        side.engine.check()
        side.close()
        side.engine.close()
