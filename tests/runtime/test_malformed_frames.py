"""Malformed frames at the engine's socket: each is answered or dropped, and no other program notices.

``PHLOEM_FUZZ_FRAMES=100000`` sends more of them.
"""

import copy
import os
import random
import resource
from collections import Counter
from typing import Any

import msgspec
import pytest
import zmq
from phloem.protocol import errors
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.engine_socket import EngineSocket
from phloem.tests.runtime.server.test_malformed import places
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import Heard, RawClient, begin, encode, served, wait_until

NUM_FRAMES = int(os.environ.get("PHLOEM_FUZZ_FRAMES", "4000"))
PER_BATCH = 50
LAST = 10**6  # id of the query that ends a batch
MOST_GROWTH_KB = 300_000
HELLO = m.Hello(version=m.PROTOCOL_VERSION)
MANY = SamplingParams(
    max_tokens=3,
    min_tokens=1,
    stop=("x",),
    seed=1,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logit_bias={65: 1.0},
    return_logprob=True,
)
OPS: list[o.AnyOp] = [
    o.Text(op=0, seq=0, text="Once ä"),
    o.Special(op=1, seq=0, ids=(257, 258)),
    o.Mark(op=2, seq=0),
    o.Gen(op=3, seq=0, params=MANY, n=2, stream=True),
    o.Ref(op=4, seq=0, source=3, index=1),
    o.Fork(op=5, seq=0, children=(1, 2)),
    o.Select(op=6, seq=1, choices=("a", "b")),
    o.Score(op=7, seq=2, text="c"),
    o.Join(op=8, seq=0, children=(1, 2), mode="concate_and_append"),
    o.Mark(op=9, seq=0, begin=2),
    o.Rollback(op=10, seq=0, to=2),
    o.Pin(op=11, seq=0, ttl_s=0.1),
    o.Gen(op=13, seq=0, params=SamplingParams(max_tokens=2), drawn=(o.Drawn((97,)),)),
    o.Close(op=14, seq=0),
    o.Close(op=15, seq=1),
    o.Close(op=16, seq=2),
]
SETTINGS = m.ProgramSettings(tenant="t", deadline_s=5.0, cache_salt="s", trace=True, name="n")
VALID: list[dict[str, Any]] = [
    msgspec.to_builtins(message, builtin_types=(bytes,))
    for message in (
        *[m.Submit("p", OPS, SETTINGS)] * 4,
        m.Submit("q", [o.Text(op=0, seq=0, text="a"), o.Gen(op=1, seq=0, params=SamplingParams(max_tokens=2))]),
        m.Submit("r", [o.Image(op=12, seq=0, hash="h", data=b"\xff")]),
        m.Cancel("p", seq=0, op=3),
        m.Credit(3),
        m.Query(7, "metrics"),
        m.Query(8, "cache_nodes"),
        HELLO,
        m.Ping(),
    )
]
HUGE = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\x91" * 100_000,
]


def junk(rng: random.Random) -> Any:
    deep: Any = []
    for _ in range(rng.choice((3, 150))):
        deep = [deep]
    numbers = [
        0,
        -1,
        1,
        255,
        259,
        2**31,
        5e-324,
        1e-38,
        0.5,
        2**63 - 1,
        2**64 - 1,
        -(2**63),
        1e308,
        float("nan"),
        float("inf"),
        -0.0,
    ]
    others = [
        None,
        True,
        "",
        "x",
        "\0",
        "a" * 3000,
        b"",
        b"\xff",
        [],
        {},
        [None],
        {"a": 1},
        {1: 2},
        deep,
        "submit",
        "gen",
    ]
    return rng.choice([*numbers, *others])


def like(rng: random.Random, value: Any) -> Any:
    """Another value of the same type, which is decoded and has to be checked."""
    return rng.choice([one for one in (junk(rng) for _ in range(40)) if type(one) is type(value)] or [value])


def malformed(rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        return rng.randbytes(rng.choice((0, 1, 20, 2000)))
    message = copy.deepcopy(rng.choice(VALID))
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        container, key = rng.choice(places(message))
        match rng.randrange(8):
            case 0:
                container[key] = junk(rng)
            case 1:
                del container[key]
            case 2 | 3 | 4 | 5 | 6:
                container[key] = like(rng, container[key])
            case _ if isinstance(container, dict):
                container["x"] = junk(rng)
        if not places(message):
            break
    frame = encode(message)
    at = rng.randrange(len(frame))
    match rng.randrange(25):
        case 0:
            return frame[:at]
        case 1:
            return frame[:at] + rng.randbytes(1) + frame[at + 1 :]
        case 2:
            return frame[:at] + rng.choice(HUGE) + frame[at:]
        case 3:
            return frame + rng.randbytes(5)
        case _:
            return frame


@pytest.fixture(scope="module")
def engine(tiny_model_path):
    config = EngineConfig(model=str(tiny_model_path), precision="float32", num_slots=2048, num_threads=1)
    engine = EngineCore(config)
    yield engine
    engine.close()


def answer_of(client: Client, program: str) -> str:
    """The text of a program that runs from its submission to its end."""
    heard = Heard()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    ops = [o.Text(op=0, seq=0, text="A tree"), o.Gen(op=1, seq=0, params=params), o.Close(op=2, seq=0)]
    begin(client, m.Submit(program, ops), heard)
    (done,) = [event for event in heard.until(m.Closed) if isinstance(event, m.Done) and event.op == 1]
    return done.value[0]


def peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_malformed_frames_harm_no_other_program(engine, tmp_path, caplog):
    rng = random.Random(7)
    heard: Counter[type] = Counter()
    with served(engine, f"ipc://{tmp_path}/s") as socket, Client(socket.url) as client:
        expected = answer_of(client, "before")
        before_kb = peak_kb()
        attacker = RawClient(socket.url)
        for start in range(0, NUM_FRAMES, PER_BATCH):
            attacker.say(HELLO, *(malformed(rng) for _ in range(PER_BATCH)), HELLO, m.Query(LAST, "info"))
            answers: list[m.RuntimeMessage] = []
            while not any(isinstance(one, m.Answer) and one.id == LAST for one in answers):
                answers += attacker.hear()
            heard.update(map(type, answers))
            attacker.say(m.Bye())
            if start % 500 == 0:
                assert answer_of(client, f"beside {start}") == expected
        attacker.close()
        assert answer_of(client, "after") == expected
        wait_until(lambda: not engine.programs.by_key)
    assert min(heard[kind] for kind in (m.ProtocolFault, m.Rejected, m.Accepted, m.Done)) > 10, heard
    assert "a step failed" not in caplog.text
    assert peak_kb() - before_kb < MOST_GROWTH_KB
    engine.check()


def test_large_frames_cost_little_more_than_their_size(engine, tmp_path):
    """Before its type was looked at, a list of lists in a field of 20 MB became 1.4 GB of Python's lists in 7 s."""
    nested = b"\x90" * (20 << 20)
    head = b"\xdd" + len(nested).to_bytes(4, "big")
    frames = [b"\x81" + encode(name) + head + nested for name in ("m", "version", "program", "id", "x")]
    frames.append(b"\x82" + encode("m") + encode("submit") + encode("ops") + head + nested)
    with served(engine, f"ipc://{tmp_path}/s") as socket, Client(socket.url) as client:
        attacker = RawClient(socket.url)
        attacker.say(HELLO)
        assert isinstance(attacker.hear()[0], m.Welcome)
        before_kb = peak_kb()
        for frame in frames:
            attacker.say(frame)
            (fault,) = attacker.hear()
            assert isinstance(fault, m.ProtocolFault) and "the limit is 16,777,216" in fault.error.message
        attacker.socket.send_multipart([b"x" * 1000] * 1000)
        (fault,) = attacker.hear()
        assert "a message of 1000 frames" in fault.error.message
        attacker.say(b"x" * (66 << 20))  # ZeroMQ ends the connection, which then begins anew
        attacker.say(m.Ping())
        assert isinstance(attacker.hear()[0], m.ProtocolFault | m.Pong)
        assert len(answer_of(client, "p")) > 0
        attacker.close()
    assert peak_kb() - before_kb < MOST_GROWTH_KB


def test_an_id_that_every_reply_would_repeat_is_short(engine, tmp_path):
    """A program's id of 8 MB came back with each of 4,000 operations: 32 GB."""
    with served(engine, f"ipc://{tmp_path}/s") as socket, Client(socket.url) as client:
        attacker = RawClient(socket.url)
        attacker.say(HELLO)
        attacker.hear()
        for message in (m.Submit("p" * 257, []), m.Cancel("p" * 257), m.Query(1, "q" * 257)):
            attacker.say(message)
            (answer,) = attacker.hear()
            assert len(encode(answer)) < 500 and "length <= 256" in answer.error.message
        attacker.say(m.Submit("p" * 256, [o.Close(op=0, seq=0)]))
        assert isinstance(attacker.hear()[0], m.Accepted)
        attacker.close()
        with pytest.raises(errors.InvalidRequest, match="257 characters, but may have 256"):
            begin(client, m.Submit("p" * 257, []), Heard())


@pytest.mark.parametrize("frame", [b"\xc1", encode(m.Ping())])
def test_a_client_that_sends_and_never_reads_is_dropped(tmp_path, caplog, frame):
    """The replies to it waited in the engine, without a limit."""
    engine = StringEngine(limits=m.Limits(max_submit_bytes=100_000))
    engine_socket = EngineSocket(f"ipc://{tmp_path}/s", engine.welcome())
    deaf = RawClient(engine_socket.url, rcvhwm=1)
    deaf.say(HELLO)
    inbox: list[object] = []
    num_sent = 0
    while not inbox:
        for _ in range(1000):
            if deaf.socket.poll(1000, zmq.POLLOUT):
                deaf.say(frame)
                num_sent += 1
        inbox = engine_socket.receive(0.1)
        assert num_sent < 200_000, "the client was not dropped"
    ((_, message),) = inbox
    assert message == m.Bye() and "has taken no reply while it sent" in caplog.text
    reader = RawClient(engine_socket.url)
    reader.say(HELLO)
    assert [one for one in engine_socket.receive(1.0) if not isinstance(one[1], m.Bye)] == []
    assert isinstance(reader.hear()[0], m.Welcome)
    for one in (deaf, reader):
        one.close()
    engine_socket.close()
