"""The engine socket: admission of clients, answers to them, and the effect of a slow client."""

import random
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from phloem.protocol import channel, errors
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.address import ClientKeys, ServerKeys, new_key_pair
from phloem.protocol.client import Client
from phloem.runtime.engine_socket import EngineSocket, Inbox
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import WAIT_S, RawClient, ask, encode, served, welcome

STATS = m.ProgramStats()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Pair:
    """A engine_socket stepped by hand and its clients, over inproc: what one side says the other finds at once."""

    def __init__(self, url: str, **options: object) -> None:
        self.clock = Clock()
        self.socket = EngineSocket(url, welcome(**options), client_timeout_s=10.0, clock=self.clock)
        self.clients: list[RawClient] = []

    def join(self, *, rcvhwm: int = 1000) -> RawClient:
        client = RawClient(self.socket.url, rcvhwm=rcvhwm)
        self.clients.append(client)
        client.say(m.Hello(version=m.PROTOCOL_VERSION))
        assert self.receive() == []
        assert isinstance(client.hear()[0], m.Welcome)
        return client

    def receive(self) -> Inbox:
        return self.socket.receive(0.2)

    def client_id(self, client: RawClient) -> bytes:
        client.say(m.Query(id=0, what="info"))
        ((client_id, _),) = self.receive()
        return client_id

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.socket.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(f"inproc://{request.node.name}")
    yield pair
    pair.close()


def delta(text: str, *, program: str = "p", op: int = 1, index: int = 0, origin: str = "generated") -> m.Delta:
    return m.Delta(program=program, op=op, text=text, token_ids=(len(text),), index=index, origin=origin)


def done(program: str = "p", op: int = 1) -> m.Done:
    return m.Done(program=program, op=op)


# -- admission --------------------------------------------------------------------------------------------------------


def test_messages_come_with_their_client_and_go_back_to_it(pair):
    first, second = pair.join(), pair.join()
    ids = pair.client_id(first), pair.client_id(second)
    assert ids[0] != ids[1]
    first.say(ask("a"))
    assert pair.receive() == [(ids[0], ask("a"))]
    pair.socket.send([(ids[1], done()), (ids[0], m.Accepted(program="a")), (ids[1], done(op=2))])
    assert second.hear() == [done(), done(op=2)], "one frame"
    assert first.hear() == [m.Accepted(program="a")]


def test_a_stranger_is_told_to_say_hello_and_is_not_served(pair):
    stranger = RawClient(pair.socket.url)
    pair.clients.append(stranger)
    stranger.say(ask())
    assert pair.receive() == []
    (fault,) = stranger.hear()
    assert isinstance(fault, m.ProtocolFault) and fault.error.where == "hello" and "Hello" in fault.error.message


@pytest.mark.parametrize(
    "hello",
    [{"m": "hello", "version": 99}, {"m": "hello", "version": 99, "new_field": 1}, {"m": "hello"}],
    ids=["newer", "with a new field", "without a version"],
)
def test_another_version_is_refused_by_its_number_even_with_fields_unknown_here(pair, hello):
    stranger = RawClient(pair.socket.url)
    pair.clients.append(stranger)
    stranger.say(encode(hello))
    pair.receive()
    (fault,) = stranger.hear()
    assert fault.error.kind == "ProtocolError" and "this engine speaks 1" in fault.error.message
    stranger.say(ask())
    assert pair.receive() == [] and isinstance(stranger.hear()[0], m.ProtocolFault)  # it is no client


def test_goodbye_and_silence_and_a_vanished_client_are_one_message_to_the_engine(pair):
    leaver, sleeper, talker = pair.join(), pair.join(), pair.join()
    leaver_id, sleeper_id = pair.client_id(leaver), pair.client_id(sleeper)
    leaver.say(m.Bye())
    assert pair.receive() == [(leaver_id, m.Bye())]
    for _ in range(3):
        pair.clock.now_s += 4.0
        talker.say(m.Ping())
        inbox = pair.receive()
        assert talker.hear() == [m.Pong()]
    assert inbox == [(sleeper_id, m.Bye())]
    (fault,) = sleeper.hear()
    assert fault.error.where == "hello" and "silent for 12.0 s, the limit is 10 s" in fault.error.message


def test_a_long_step_of_the_engine_is_not_a_silence_of_its_clients(pair):
    client = pair.join()
    client.say(m.Ping())
    pair.clock.now_s += 1000.0
    assert pair.receive() == []
    assert client.hear() == [m.Pong()]


def test_a_machine_that_stood_still_is_not_a_silence_of_its_clients(pair):
    client = pair.join()
    client_id = pair.client_id(client)
    pair.clock.now_s += 1000.0
    assert pair.receive() == []  # what the client would have sent was not sent either
    pair.clock.now_s += 4.0
    assert pair.receive() == []
    pair.clock.now_s += 4.0
    assert pair.receive() == [(client_id, m.Bye())]
    assert "silent for 13.0 s" in client.hear()[0].error.message  # the long time counts five seconds


def test_a_client_that_vanished_is_noticed_when_it_is_spoken_to(tmp_path):
    pair = Pair(f"ipc://{tmp_path}/s")
    client = pair.join()
    client_id = pair.client_id(client)
    client.close()
    inbox: Inbox = []
    end_s = time.monotonic() + 10.0
    while not inbox:
        pair.socket.send([(client_id, done())])
        inbox = pair.receive()
        assert time.monotonic() < end_s
    assert inbox == [(client_id, m.Bye())]
    pair.socket.send([(client_id, done())])
    pair.close()


# -- frames that are wrong --------------------------------------------------------------------------------------------


def test_an_unreadable_frame_is_answered_and_costs_nothing_else(pair):
    client = pair.join()
    rng = random.Random(5)
    frames = [b"", b"\xc1", b"\x00garbage", encode({"m": "nonsense"}), encode([1, 2]), encode(m.Ping())[:-1]]
    frames += [rng.randbytes(200) for _ in range(50)]
    frames.append(encode({"m": "ping", "extra": 1}))
    for frame in frames:
        client.say(frame)
        assert pair.receive() == []
        (fault,) = client.hear()
        assert isinstance(fault, m.ProtocolFault) and "was not understood" in fault.error.message
    client.socket.send_multipart([b"two", b"frames"])
    assert pair.receive() == []
    (fault,) = client.hear()
    assert "every message is one frame" in fault.error.message
    client.say(m.Ping())
    pair.receive()
    assert client.hear() == [m.Pong()]


def test_an_unreadable_submit_or_query_is_answered_to_who_waits_for_it(pair):
    client = pair.join()
    wrong_type = {"m": "submit", "program": "p", "ops": [{"t": "text", "op": 0, "seq": 0, "text": 5}]}
    unknown_op = {"m": "submit", "program": "q", "ops": [{"t": "dance", "op": 0, "seq": 0}]}
    client.say(encode(wrong_type), encode(unknown_op), encode({"m": "query", "id": 7, "what": None}))
    assert pair.receive() == []
    first, second, answer = [client.hear()[0] for _ in range(3)]
    assert isinstance(first, m.Rejected) and first.program == "p"
    assert "Expected `str`, got `int`" in first.errors[0].message and first.errors[0].where == "ops[0].text"
    assert isinstance(second, m.Rejected) and "dance" in second.errors[0].message
    assert isinstance(answer, m.Answer) and answer.id == 7 and answer.error.where == "what"


def test_a_frame_beyond_the_limit_is_rejected_with_both_numbers(request):
    pair = Pair(f"inproc://{request.node.name}", limits=m.Limits(max_submit_bytes=1000))
    client = pair.join()
    client.say(ask(text="x" * 2000))
    assert pair.receive() == []
    (rejected,) = client.hear()
    assert isinstance(rejected, m.Rejected) and rejected.errors[0].kind == "LimitExceeded"
    assert "the limit is 1,000" in rejected.errors[0].message
    pair.close()


# -- credit and slow clients ------------------------------------------------------------------------------------------


def test_without_credit_messages_every_delta_is_sent(pair):
    client = pair.join()
    client_id = pair.client_id(client)
    pair.socket.send([(client_id, delta(str(i))) for i in range(100)])
    assert len(client.hear_all()) == 100


def test_deltas_beyond_the_credit_merge_and_wait_for_more(pair):
    client = pair.join()
    client_id = pair.client_id(client)
    client.say(m.Credit(n=2))
    pair.receive()
    pair.socket.send([(client_id, delta(text)) for text in "abcd"])
    assert client.hear_all() == [delta("a"), delta("b")]
    pair.socket.send([(client_id, delta("e"))])
    assert client.hear_all() == []
    client.say(m.Credit(n=1))
    pair.receive()
    (merged,) = client.hear_all()
    assert (merged.text, merged.token_ids) == ("cde", (1, 1, 1))


def test_an_op_s_end_takes_its_waiting_deltas_along_and_nothing_else_waits(pair):
    client = pair.join()
    client_id = pair.client_id(client)
    client.say(m.Credit(n=0))
    pair.receive()
    outbox = [delta("a"), delta("x", op=2), delta("b"), delta("A", index=1), done(), m.Accepted(program="q")]
    pair.socket.send([(client_id, message) for message in outbox])
    assert [getattr(message, "text", message) for message in client.hear_all()] == ["ab", "A", *outbox[-2:]]
    closed = m.Closed(program="p", stats=STATS)
    pair.socket.send([(client_id, closed)])
    assert client.hear_all() == [delta("x", op=2), closed]


def test_forced_and_generated_text_stay_apart_when_merged(pair):
    client = pair.join()
    client_id = pair.client_id(client)
    client.say(m.Credit(n=0))
    pair.receive()
    outbox = [delta("a"), delta("b"), delta("{", origin="forced"), delta("}", origin="forced"), delta("c")]
    pair.socket.send([(client_id, message) for message in [*outbox, done()]])
    merged = client.hear_all()[:-1]
    assert [(one.text, one.origin) for one in merged] == [("ab", "generated"), ("{}", "forced"), ("c", "generated")]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_credit_every_candidate_s_text_is_whole_before_its_end(pair, seed):
    rng = random.Random(seed)
    client = pair.join()
    client_id = pair.client_id(client)
    sent: dict[tuple[int, int], str] = {}
    heard: dict[tuple[int, int], str] = {}
    live, ended = list(range(6)), set()

    def listen() -> None:
        for message in client.hear_all():
            key = (message.op, getattr(message, "index", 0))
            if isinstance(message, m.Delta):
                assert message.op not in ended
                heard[key] = heard.get(key, "") + message.text
            else:
                ended.add(message.op)
                assert all(heard.get(key, "") == text for key, text in sent.items() if key[0] == message.op)

    for _ in range(60):
        outbox: list[m.RuntimeMessage] = []
        for _ in range(rng.randrange(8)):
            op, index = rng.choice(live), rng.randrange(3)
            if len(live) > 1 and rng.random() < 0.03:
                live.remove(op)
                outbox.append(done(op=op))
            else:
                origin = rng.choice(["generated", "forced"])
                outbox.append(delta(f"{rng.randrange(1000)},", op=op, index=index, origin=origin))
                sent[op, index] = sent.get((op, index), "") + outbox[-1].text
        pair.socket.send([(client_id, message) for message in outbox])
        if rng.random() < 0.3:
            client.say(m.Credit(n=rng.randrange(4)))
            pair.receive()
        if rng.random() < 0.2:
            listen()
    pair.socket.send([(client_id, done(op=op)) for op in live])
    listen()
    assert ended == set(range(6)) and heard == sent


def test_a_client_that_does_not_read_blocks_nothing_and_gets_everything_merged(pair):
    slow, quick = pair.join(rcvhwm=1), pair.join()
    slow_id, quick_id = pair.client_id(slow), pair.client_id(quick)
    num = 5000
    for i in range(num):
        pair.socket.send([(slow_id, delta(f"{i},"))])
    pair.socket.send([(slow_id, done()), (quick_id, done())])
    assert quick.hear() == [done()]
    heard: list[m.RuntimeMessage] = []
    end_s = time.monotonic() + 60.0
    while not heard or not isinstance(heard[-1], m.Done):
        pair.socket.receive(0.01)  # what was stuck goes on as the client reads
        heard += slow.hear_all()
        assert time.monotonic() < end_s
    assert "".join(one.text for one in heard[:-1]) == "".join(f"{i}," for i in range(num))
    assert len(heard) < 1000


# -- addresses --------------------------------------------------------------------------------------------------------


def test_an_ipc_socket_is_the_owner_s_alone_and_is_removed(tmp_path):
    path = tmp_path / "engine.sock"
    engine_socket = EngineSocket(f"ipc://{path}", welcome())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    engine_socket.close()
    assert not path.exists()


def test_a_socket_in_use_a_file_and_a_missing_folder_are_refused_and_a_dead_socket_is_not(tmp_path):
    path = tmp_path / "engine.sock"
    engine_socket = EngineSocket(f"ipc://{path}", welcome())
    with pytest.raises(errors.InvalidParams, match="another engine listens there"):
        EngineSocket(f"ipc://{path}", welcome())
    engine_socket.close()
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    EngineSocket(f"ipc://{dead}", welcome()).close()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(errors.InvalidParams, match="a file lies there"):
        EngineSocket(f"ipc://{tmp_path}/notes.txt", welcome())
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(errors.InvalidParams, match="cannot listen at"):
        EngineSocket(f"ipc://{tmp_path}/no/such/folder", welcome())


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.168.1.5", "eth0", "[::]"])
def test_plain_tcp_that_others_can_reach_is_refused(host):
    with pytest.raises(errors.InvalidParams, match="needs CurveZMQ keys"):
        EngineSocket(f"tcp://{host}:0", welcome())


def test_a_busy_port_is_named():
    engine_socket = EngineSocket("tcp://localhost:*", welcome())
    assert engine_socket.url.startswith("tcp://127.0.0.1:")
    with pytest.raises(errors.InvalidParams, match=f"cannot listen at {engine_socket.url}: Address already in use"):
        EngineSocket(engine_socket.url, welcome())
    engine_socket.close()


def test_with_keys_only_known_clients_of_the_right_engine_come_in():
    engine_key, client_key, other_key = new_key_pair(), new_key_pair(), new_key_pair()
    keys = ServerKeys(secret=engine_key[1], clients=frozenset([client_key[0]]))
    assert engine_key[1] not in repr(keys)
    context: zmq.Context = zmq.Context()
    with served(StringEngine(), "tcp://127.0.0.1:*", keys=keys, context=context) as engine_socket:
        with Client(engine_socket.url, keys=ClientKeys(secret=client_key[1], server=engine_key[0])) as client:
            assert client.query("info")["model"] == "string"
        refused: list[str] = []

        def knock(keys: ClientKeys | None) -> None:
            with pytest.raises(errors.EngineLost) as found:
                Client(engine_socket.url, keys=keys, connect_timeout_s=WAIT_S)
            refused.append(str(found.value))

        wrong = [
            ClientKeys(secret=other_key[1], server=engine_key[0]),
            ClientKeys(secret=client_key[1], server=other_key[0]),
            None,
        ]
        threads = [threading.Thread(target=knock, args=(keys,)) for keys in wrong]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
        assert len(refused) == 3 and all("refuses the connection" in text for text in refused), refused
    context.term()


class LateEvents(zmq.Socket):
    """A monitor whose first events come late: ZeroMQ has ended the connection by then."""

    num_late = 20

    def recv_multipart(self, *arguments, **options):
        if self.num_late:
            self.num_late -= 1
            self.poll(1000)
            time.sleep(0.02)  # ZeroMQ tells of the refusal, then takes the socket's queue away
            raise zmq.Again
        return super().recv_multipart(*arguments, **options)


class LateContext(zmq.Context):
    def socket(self, kind, **options):
        return super().socket(kind, socket_class=LateEvents if kind == zmq.PAIR else zmq.Socket)


def test_a_client_that_is_refused_does_not_wait_for_a_connection_to_greet(monkeypatch):
    monkeypatch.setattr(channel, "HELLO_EVERY_S", 0.0)
    engine_key, client_key, other_key = new_key_pair(), new_key_pair(), new_key_pair()
    keys = ServerKeys(secret=engine_key[1], clients=frozenset([client_key[0]]))
    context, late = zmq.Context(), LateContext()
    ended: list[str] = []

    def knock(url: str) -> None:
        with pytest.raises(errors.EngineLost) as found:
            Client(url, keys=ClientKeys(secret=other_key[1], server=engine_key[0]), context=late)
        ended.append(str(found.value))

    with served(StringEngine(), "tcp://127.0.0.1:*", keys=keys, context=context) as engine_socket:
        thread = threading.Thread(target=knock, args=(engine_socket.url,), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert len(ended) == 1 and "refuses the connection" in ended[0]
    context.term()
    late.term()


@pytest.mark.parametrize(
    "url", ["", "engine", "http://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "ipc://"]
)
def test_an_address_that_is_none_is_named(url):
    with pytest.raises(errors.InvalidParams, match="url="):
        EngineSocket(url, welcome())


def test_a_path_too_long_for_the_kernel_is_named():
    with pytest.raises(errors.InvalidParams, match="the limit is 107"):
        EngineSocket(f"ipc:///tmp/{'x' * 120}", welcome())
    assert not Path(f"/tmp/{'x' * 120}").exists()


def test_a_key_of_another_length_is_refused():
    with pytest.raises(errors.InvalidParams, match="40 characters"):
        ServerKeys(secret="short", clients=frozenset())


def test_a_program_s_ops_survive_the_frame():
    ops: list[o.AnyOp] = [
        o.Text(op=0, seq=0, text="ä\x00\U0001f333"),
        o.Special(op=1, seq=0, ids=(1, 2)),
        o.Ref(op=2, seq=0, source=1),
        o.Image(op=3, seq=0, hash="h", data=b"\xff"),
        o.Select(op=4, seq=0, choices=("a", "b"), method="greedy_token_selection", append=False),
        o.Fork(op=5, seq=0, children=(1, 2)),
        o.Join(op=6, seq=0, children=(1, 2), mode="concate_and_append"),
        o.Mark(op=7, seq=0, begin=3),
        o.Rollback(op=8, seq=0, to=7),
        o.Pin(op=9, seq=0, ttl_s=1.5),
        o.Close(op=10, seq=0),
    ]
    from phloem.protocol.frames import decode_client, encode_client

    submit = m.Submit(program="p", ops=ops, settings=m.ProgramSettings(deadline_s=2.0))
    assert decode_client(encode_client(submit)) == submit
