"""The client: every event of a call comes once, also when the engine refuses it, falls silent or goes away."""

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from phloem.protocol import channel, errors
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.client import Client
from phloem.protocol.program_call import OpFailed, SubmitRefused
from phloem.runtime.engine_socket import EngineSocket
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import (
    WAIT_S,
    Heard,
    RawEngine,
    ask,
    begin,
    failures,
    served,
    talking,
    wait_until,
    welcome,
)

LONG = " ".join(str(i) for i in range(50_000))
STATS = m.ProgramStats(submits=1)


def endless(**options: float) -> StringEngine:
    return StringEngine(reply=lambda prompt, op: LONG, step_s=0.001, **options)


class Talk:
    """A client and the raw engine it talks to."""

    def __init__(self, url: str, **options: object) -> None:
        self.engine = RawEngine(url, heartbeat_s=0.05)
        made: list[Client] = []
        thread = threading.Thread(target=lambda: made.append(Client(self.engine.url, **options)))
        thread.start()
        self.engine.welcome()
        thread.join(WAIT_S)
        (self.client,) = made

    def submit(self, submit: m.Submit) -> Heard:
        heard = Heard()
        self.call = begin(self.client, submit, heard)
        self.engine.hear(m.Submit)
        return heard

    def settle(self) -> None:
        """Wait until the client has handled all messages: it cancels an unknown program."""
        self.engine.say(m.Accepted("unknown"))
        assert self.engine.hear(m.Cancel).program == "unknown"

    def close(self) -> None:
        self.client.close()
        self.engine.close()


@pytest.fixture
def talk(request: pytest.FixtureRequest, tmp_path) -> Iterator[Talk]:
    talk = Talk(f"ipc://{tmp_path}/s", **getattr(request, "param", {}))
    yield talk
    talk.close()


# -- a program's life -------------------------------------------------------------------------------------------------


def test_a_program_s_messages_come_in_order_on_the_client_s_thread(tmp_path):
    with talking(StringEngine(reply=lambda prompt, op: " a b c"), f"ipc://{tmp_path}/s") as client:
        heard = Heard()
        begin(client, ask(stream=True), heard)
        messages = heard.until(m.Closed)
        assert [type(message).__name__ for message in messages] == [
            "Accepted", "Done", "Delta", "Delta", "Delta", "Done", "Done", "Closed",
        ]  # fmt: skip
        assert heard.threads == {"phloem-client"}
        assert client.welcome.model == "string"


def test_a_running_program_s_id_is_taken_until_it_is_over(tmp_path):
    with talking(StringEngine(), f"ipc://{tmp_path}/s") as client:
        heard = Heard()
        call = begin(client, m.Submit("p", [o.Text(op=0, seq=0, text="a")]), heard)
        heard.until(m.Done)
        with pytest.raises(errors.InvalidRequest, match="program 'p' is running already"):
            begin(client, m.Submit("p", [o.Text(op=1, seq=0, text="b")]), Heard())
        call.submit([o.Close(op=2, seq=0)])
        assert heard.until(m.Closed)[-2].value == "a"
        begin(client, ask(), heard)
        heard.until(m.Closed)


def test_a_rejected_program_is_forgotten_and_its_name_is_free(tmp_path):
    with talking(StringEngine(), f"ipc://{tmp_path}/s") as client:
        refused = Heard()
        begin(client, m.Submit("p", [o.Ref(op=0, seq=0, source=9)]), refused)
        (event,) = refused.until(SubmitRefused)
        assert "op 9 produces no text" in event.error.message and event.ops == (0,)
        heard = Heard()
        begin(client, ask("p"), heard)
        heard.until(m.Closed)
        assert [type(event) for event in refused.rest()] == [m.Closed]


def test_a_submit_that_the_engine_cannot_read_is_refused(tmp_path):
    with talking(StringEngine(), f"ipc://{tmp_path}/s") as client:
        heard = Heard()
        begin(client, m.Submit("p", [o.Text(op=0, seq=0, text=5)]), heard)  # type: ignore[arg-type]
        (event,) = heard.until(SubmitRefused)
        assert event.error.where == "ops[0].text"


def test_a_submit_that_cannot_be_sent_raises(tmp_path):
    engine = StringEngine(limits=m.Limits(max_submit_bytes=1000))
    with talking(engine, f"ipc://{tmp_path}/s") as client:
        for text in (object(), "\ud800"):
            with pytest.raises(errors.InvalidRequest, match="cannot be sent"):
                begin(client, m.Submit("p", [o.Text(op=0, seq=0, text=text)]), Heard())
        with pytest.raises(errors.LimitExceeded, match="the limit is 1,000"):
            begin(client, ask(text="x" * 2000), Heard())
        with pytest.raises(errors.InvalidRequest, match="op id 1 is used twice"):
            begin(client, m.Submit("p", [o.Mark(op=1, seq=0), o.Close(op=1, seq=0)]), Heard())
        heard = Heard()
        begin(client, ask("p"), heard)
        heard.until(m.Closed)


def test_two_clients_may_use_one_name(tmp_path):
    with (
        served(StringEngine(), f"ipc://{tmp_path}/s") as engine_socket,
        Client(engine_socket.url) as a,
        Client(engine_socket.url) as b,
    ):
        heard = Heard(), Heard()
        begin(a, ask("same", text="one"), heard[0])
        begin(b, ask("same", text="two"), heard[1])
        texts = [one.until(m.Closed)[-2].value for one in heard]
        assert [text.split()[0] for text in texts] == ["one", "two"]


def test_many_threads_submit_through_one_client(tmp_path):
    with talking(StringEngine(), f"ipc://{tmp_path}/s") as client:
        heard = [Heard() for _ in range(64)]

        def run(part: int) -> None:
            for i in range(part, 64, 8):
                begin(client, ask(f"p{i}", text=str(i)), heard[i])

        threads = [threading.Thread(target=run, args=(part,)) for part in range(8)]
        for thread in threads:
            thread.start()
        for i, one in enumerate(heard):
            assert one.until(m.Closed)[-2].value.startswith(str(i))


def test_cancel_keeps_what_was_generated_and_nothing_may_follow(tmp_path):
    with talking(endless(), f"ipc://{tmp_path}/s") as client:
        heard = Heard()
        call = begin(client, ask(stream=True), heard)
        streamed = heard.until(m.Delta)[-1].text
        call.cancel()
        with pytest.raises(errors.Cancelled, match="program 'p' was cancelled"):
            call.submit([o.Text(op=9, seq=0, text="more")])
        messages = heard.until(m.Closed)
        assert failures(messages) == {1: "Cancelled", 2: "Cancelled"}
        streamed += "".join(one.text for one in messages if isinstance(one, m.Delta))
        assert next(one for one in messages if isinstance(one, OpFailed)).partial == (streamed,)
        call.cancel()
        client.cancel("never seen")
        assert client.query("info")["model"] == "string"


def test_a_submit_that_crosses_the_program_s_end_fails_and_leaves_nothing_running(talk):
    heard = talk.submit(ask())
    talk.call.submit([o.Text(op=7, seq=3, text="late")])
    talk.engine.hear(m.Submit)
    ended = [m.Failed("p", op, errors.DeadlineExceeded("late").info()) for op in range(3)]
    talk.engine.say(m.Accepted("p"), *ended, m.Closed("p", STATS))
    messages = heard.until(m.Closed)
    assert failures(messages)[7] == "Cancelled" and len(failures(messages)) == 4
    talk.engine.say(m.Accepted("p"))  # the engine has taken the late submit for a new program
    assert talk.engine.hear(m.Cancel).program == "p"


def test_an_op_ends_once_whatever_the_engine_repeats(talk):
    heard = talk.submit(ask())
    done = m.Done("p", 1, ["x"])
    talk.engine.say(m.Accepted("p"), done, done, m.Failed("p", 1, errors.InternalError("no").info()))
    talk.engine.say(m.Delta(program="p", op=1, text="late"), m.Done("q", 0), m.Closed("p", STATS), done)
    messages = heard.until(m.Closed)
    assert [one for one in messages if isinstance(one, m.Done | m.Delta)] == [done]
    assert failures(messages) == {0: "InternalError", 2: "InternalError"}, "the engine forgot them"
    talk.settle()
    assert heard.rest() == []


def test_an_on_event_that_raises_is_logged_and_hurts_nobody(tmp_path, caplog):
    with talking(StringEngine(), f"ipc://{tmp_path}/s") as client:

        def broken(message: m.RuntimeMessage) -> None:
            raise ValueError("my own fault")

        begin(client, ask("broken"), broken)
        heard = Heard()
        begin(client, ask("whole"), heard)
        heard.until(m.Closed)
    said = [record for record in caplog.records if record.name == "phloem.protocol.program_call"]
    assert said[0].getMessage() == "the handler of program broken failed on Accepted"
    assert "my own fault" in str(said[0].exc_info[1]) and len(said) == 5, "one for each event"


def test_an_on_event_may_submit_and_cancel_and_close_but_not_wait(tmp_path):
    with talking(StringEngine(), f"ipc://{tmp_path}/s") as client:
        second, refusals, over = Heard(), [], threading.Event()

        def first(message: m.RuntimeMessage) -> None:
            if isinstance(message, m.Accepted):
                try:
                    client.query("info")
                except errors.InternalError as error:
                    refusals.append(str(error))
                begin(client, ask("second"), second)
            elif isinstance(message, m.Closed):
                client.close()
                over.set()

        begin(client, ask("first"), first)
        assert over.wait(WAIT_S) and "on_event cannot call it" in refusals[0]


def test_a_slow_handler_gets_fewer_deltas_and_the_whole_text(tmp_path):
    text = "".join(f" {i}" for i in range(6000))
    engine = StringEngine(reply=lambda prompt, op: text)
    with talking(engine, f"ipc://{tmp_path}/s") as client:
        deltas: list[str] = []
        done = threading.Event()

        def slow(message: m.RuntimeMessage) -> None:
            if isinstance(message, m.Delta):
                deltas.append(message.text)
                if len(deltas) == 1:
                    wait_until(lambda: not engine.programs)  # the engine ends the program in the meantime
            elif isinstance(message, m.Closed):
                done.set()

        begin(client, ask(stream=True), slow)
        assert done.wait(WAIT_S)
        assert "".join(deltas) == text and len(deltas) < 6000


# -- questions --------------------------------------------------------------------------------------------------------


def test_a_query_is_answered_refused_or_late(talk, tmp_path):
    with talking(StringEngine(), f"ipc://{tmp_path}/other") as client:
        assert client.query("info")["model"] == "string"
        with pytest.raises(errors.InvalidRequest, match="unknown query 'weather'"):
            client.query("weather")
    with pytest.raises(errors.Overloaded, match="'metrics' within 0.1 s"):
        talk.client.query("metrics", timeout_s=0.1)
    asked = talk.engine.hear(m.Query)
    talk.engine.say(m.Answer(id=asked.id, value={"late": True}))
    assert talk.submit(ask()).rest() == []  # the engine has the submit, and nothing has failed


def test_a_waiting_query_hears_of_the_engine_s_end(talk):
    found: list[str] = []

    def ask_metrics() -> None:
        try:
            talk.client.query("metrics", timeout_s=WAIT_S)
        except errors.EngineLost as error:
            found.append(str(error))

    thread = threading.Thread(target=ask_metrics)
    thread.start()
    talk.engine.hear(m.Query)
    talk.engine.close()
    thread.join(WAIT_S)
    assert "closed the connection" in found[0]


# -- losing the engine ------------------------------------------------------------------------------------------------


def test_a_closed_connection_fails_every_pending_op_once_and_at_once(talk):
    heard = talk.submit(ask("a")), talk.submit(ask("b"))
    talk.engine.say(m.Accepted("a"), m.Done("a", 0))
    heard[0].until(m.Done)
    talk.engine.close()
    assert failures(heard[0].until(m.Closed)) == {1: "EngineLost", 2: "EngineLost"}
    assert failures(heard[1].until(m.Closed)) == {0: "EngineLost", 1: "EngineLost", 2: "EngineLost"}
    assert heard[0].rest() == heard[1].rest() == []
    for attempt in (lambda: begin(talk.client, ask("c"), Heard()), lambda: talk.client.query("info")):
        with pytest.raises(errors.EngineLost, match="closed the connection"):
            attempt()
    talk.call.cancel()


def test_a_new_engine_at_the_old_address_is_not_taken_for_the_old_one(talk):
    heard = talk.submit(ask())
    talk.engine.close()
    with served(StringEngine(), talk.engine.url):
        assert set(failures(heard.until(m.Closed)).values()) == {"EngineLost"}
        with pytest.raises(errors.EngineLost):
            begin(talk.client, ask("next"), Heard())
        with Client(talk.engine.url) as fresh:
            assert fresh.query("info")["model"] == "string"


@pytest.mark.parametrize("talk", [{"engine_timeout_s": 0.3}], indirect=True)
def test_a_silent_engine_is_lost_after_its_time(talk):
    messages = talk.submit(ask()).until(m.Closed)
    assert failures(messages)[0] == "EngineLost" and "silent for" in messages[0].error.message


def test_an_engine_that_answers_pings_is_not_silent(talk):
    heard = talk.submit(ask())
    for _ in range(3):
        talk.engine.hear(m.Ping)
        answered_s = time.monotonic()
        talk.engine.say(m.Pong())
        # silence counts from the oldest unanswered ping: with this one answered, from a later one
        wait_until(lambda since_s=answered_s: talk.client.silent_s < time.monotonic() - since_s)
    assert heard.rest() == []


def test_time_in_which_the_client_stood_still_is_no_silence_of_its_engine(talk, monkeypatch):
    ahead_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(channel, "time", clock)
    heard = talk.submit(ask())
    talk.engine.hear(m.Ping)
    ahead_s[0] = 1000.0
    talk.engine.hear(m.Ping)
    talk.engine.hear(m.Ping)  # sent after it looked at how long its engine had been silent
    assert heard.rest() == [] and talk.client.silent_s < 999.0


def test_a_lost_engine_s_error_is_the_reason_that_its_process_gives(tmp_path):
    died = threading.Event()
    talk = Talk(f"ipc://{tmp_path}/s", engine_alive=lambda: "it was ended by SIGKILL" if died.is_set() else None)
    heard = talk.submit(ask())
    died.set()
    assert heard.until(m.Closed)[0].error.message == "it was ended by SIGKILL"
    talk.close()


def test_a_frame_that_is_not_of_the_protocol_ends_the_talk(talk):
    heard = talk.submit(ask())
    talk.engine.say(b"\xc1")
    messages = heard.until(m.Closed)
    assert failures(messages)[0] == "EngineLost" and "not understood" in messages[0].error.message


def test_a_client_the_engine_dropped_knows_it(request):
    now_s = itertools.count(0, 4)  # every look at the clock is so many seconds later
    engine = StringEngine(heartbeat_s=60.0)  # so that the client is silent
    engine_socket = EngineSocket(
        f"inproc://{request.node.name}", engine.welcome(), client_timeout_s=30.0, clock=lambda: next(now_s)
    )
    over, is_dropped = threading.Event(), threading.Event()

    def run() -> None:
        while not over.is_set():
            inbox = engine_socket.receive(0.01)
            if any(isinstance(message, m.Bye) for _, message in inbox):
                is_dropped.set()
            engine_socket.send(engine.step(inbox))

    thread = threading.Thread(target=run)
    thread.start()
    client = Client(engine_socket.url)
    heard = Heard()
    try:
        begin(client, ask(), heard)
    except errors.EngineLost as error:  # it may know so soon
        assert "Hello" in str(error) or "silent" in str(error)
    else:
        kinds = failures(heard.until(m.Closed))
        assert set(kinds.values()) <= {"EngineLost"}
    assert is_dropped.wait(WAIT_S)
    with pytest.raises(errors.EngineLost, match="Hello|silent"):
        client.query("info")
    client.close()
    over.set()
    thread.join()
    engine_socket.close()


def test_closing_fails_what_waits_once_and_says_goodbye(talk):
    heard = talk.submit(ask())
    talk.client.close()
    talk.client.close()
    assert failures(heard.rest()) == {0: "Cancelled", 1: "Cancelled", 2: "Cancelled"}
    assert isinstance(talk.engine.hear(m.Bye), m.Bye)
    with pytest.raises(errors.EngineLost, match="the client was closed"):
        begin(talk.client, ask("q"), Heard())
    with pytest.raises(errors.EngineLost, match="the client was closed"):
        talk.client.query("info")


def test_what_was_submitted_before_closing_is_still_sent(talk):
    begin(talk.client, ask(), Heard())
    talk.client.close()
    assert talk.engine.hear(m.Submit).program == "p"


# -- connecting -------------------------------------------------------------------------------------------------------


def test_nobody_at_an_address_is_an_error_not_a_wait(tmp_path):
    with pytest.raises(errors.EngineLost, match=r"nothing answers at ipc://.* within 0.2 s; is an engine"):
        Client(f"ipc://{tmp_path}/nobody", connect_timeout_s=0.2)
    with pytest.raises(errors.EngineLost, match="it is dead"):
        Client(f"ipc://{tmp_path}/nobody", connect_timeout_s=WAIT_S, engine_alive=lambda: "it is dead")
    with pytest.raises(errors.InvalidParams, match="needs CurveZMQ keys"):
        Client("tcp://10.0.0.1:5000", connect_timeout_s=0.2)


def test_an_engine_that_starts_later_is_found(tmp_path):
    url = f"ipc://{tmp_path}/s"
    made: list[Client] = []
    nobody_answered = threading.Event()

    def engine_alive() -> None:  # asked after each turn without an answer
        nobody_answered.set()

    thread = threading.Thread(target=lambda: made.append(Client(url, engine_alive=engine_alive)))
    thread.start()
    assert nobody_answered.wait(WAIT_S)
    with served(StringEngine(), url):
        thread.join(WAIT_S)
        assert made[0].query("info")
        made[0].close()


@pytest.mark.parametrize("answer", ["fault", "welcome", "noise"])
def test_an_engine_of_another_version_is_refused(tmp_path, answer):
    engine = RawEngine(f"ipc://{tmp_path}/s")

    def greet() -> None:
        engine.hear(m.Hello)
        if answer == "fault":
            engine.say(m.ProtocolFault(errors.ProtocolError("this engine speaks 2", where="hello").info()))
        elif answer == "welcome":
            engine.say(welcome(version=2))
        else:
            engine.say(msgspec.msgpack.encode([{"m": "welcome", "version": 2, "new": True}]))

    thread = threading.Thread(target=greet)
    thread.start()
    with pytest.raises(errors.ProtocolError, match="2|not understood"):
        Client(engine.url)
    thread.join()
    engine.close()
