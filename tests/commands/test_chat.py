"""``phloem chat`` on a real pseudo-terminal and in a pipe."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from phloem.commands.chat import Transcript, visible
from phloem.protocol import ops
from phloem.protocol.errors import InvalidRequest
from phloem.tests.commands.terminal import HANGING_S, terminal
from phloem.tests.lang.fakes import ENDLESS
from phloem.tests.runtime.server.conftest import Served, serving
from phloem.tests.runtime.string_engine import StringEngine
from phloem.tests.runtime.wire import wait_until

PROMPT = "\n> "


def reply(prompt: str, op: ops.Gen) -> list[str]:
    """The last question, the number of questions, the system message and the seed; endless if asked for that."""
    turns = [turn.split("<|im_end|>")[0] for turn in prompt.split("<|im_start|>")]
    asked = [turn.removeprefix("user\n") for turn in turns if turn.startswith("user\n")]
    system = "".join(turn.removeprefix("system\n") for turn in turns if turn.startswith("system\n"))
    if asked[-1] == "endless":
        return [ENDLESS]
    if op.grammar is not None:
        return [f'{{"{op.grammar.kind}": 1}}']
    given = op.params.seed is not None and op.params.seed < 1000  # a client draws a large one, for its replays
    return [f"<{asked[-1]}> of {len(asked)}, system {system or 'none'}, seed {op.params.seed if given else None}"]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as start:
        yield start(StringEngine(reply=reply, step_s=0.02))  # Ctrl-C comes before an endless answer's limit


def piped(lines: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phloem", "chat", *flags]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=HANGING_S)


def test_lines_of_a_pipe_are_answered_in_plain_text(server: Served) -> None:
    done = piped('one\n\n"""two\nthree"""\nfour\n', "--url", server.url, "--system", "Be kind.")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "<one> of 1, system Be kind., seed None\n"
        "<two\nthree> of 2, system Be kind., seed None\n"
        "<four> of 3, system Be kind., seed None\n"
    )


def test_commands_change_what_comes_next(server: Served, tmp_path: Path) -> None:
    file, schema = tmp_path / "talk.json", tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    lines = [
        *("one", "/set seed 5", "two", "/regenerate", "/system Be brief.", f"/save {file}", "/clear", "three"),
        *(f"/load {file}", "four", f"/schema {schema}", "five", "/schema", "/set seed", "six", "/stats", "/exit", "no"),
    ]
    done = piped("\n".join(lines), "--url", server.url)
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout.splitlines()
    assert shown[:-2] == [
        "<one> of 1, system none, seed None",
        "set: seed 5",
        "<two> of 2, system none, seed 5",
        "<two> of 2, system none, seed 6",
        "system: Be brief.",
        f"saved 4 messages in {file}",
        "the conversation is empty; the system message stays",
        "<three> of 1, system Be brief., seed 5",
        f"loaded 4 messages from {file}",
        "<four> of 3, system Be brief., seed 5",
        f"answers are JSON of {schema}; /schema without a file ends it",
        '{"json_schema": 1}',
        "answers follow no schema",
        "set: nothing; the defaults hold",
        "<six> of 5, system Be brief., seed None",
    ]
    assert shown[-2].startswith("last answer: ") and shown[-1] == "7 answers, 47 tokens; model string"
    saved = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[-1]["content"] == "<two> of 2, system none, seed 6"


WRONG = {
    "/sav x": "/sav is not a command; did you mean /save?",
    "/save": "a file is missing: /save FILE",
    "/load /no/such": "/no/such: No such file or directory",
    "/set temprature 1": "'temprature' is not a sampling parameter; did you mean temperature?",
    "/set top_p 2": "top_p: 2 is out of bounds; it must be in (0, 1]",
    "/set max-tokens many": "max_tokens: 'many' is not a whole number",
    "/set finish now": "finish: now is out of bounds; it must be closed or cut",
    "/set logit-bias 5": "logit_bias: '5' is not TOKEN=BIAS, for example 42=-1.5",
    "/regenerate": "/regenerate: there is no answer to generate again",
    '"""never': 'the input ends inside of """; close the text with """',
}


def test_each_wrong_command_is_one_line_and_the_chat_goes_on(server: Served) -> None:
    *lines, last = WRONG
    done = piped("\n".join([*lines, "/system", last]), "--url", server.url)
    assert done.stderr.splitlines() == [f"phloem: error: {message}" for message in WRONG.values()]
    assert (done.returncode, done.stdout) == (1, "system: (none)\n")


def test_a_terminal_shows_prompts_and_ctrl_c_stops_the_answer_alone(server: Served) -> None:
    with terminal("chat", "--url", server.url) as screen:
        assert "string; /help lists the commands" in screen.wait_for(PROMPT)
        screen.enter("endless")
        screen.wait_for(" w w w")
        screen.press("c")
        screen.wait_for(" [stopped]" + PROMPT)
        screen.enter('"""two')
        screen.wait_for("... ")
        screen.enter('lines"""')
        assert "<two\nlines> of 2, system none" in screen.wait_for(PROMPT)
        screen.press("c")
        screen.enter("")  # readline sees a signal that comes just before it waits with the next key only
        screen.wait_for("Ctrl-D or /exit ends the chat" + PROMPT)
        screen.enter("/help")
        screen.wait_for("/regenerate")
        screen.wait_for(PROMPT)
        screen.press("d")
        code, last = screen.wait_end()
        assert code == 0 and "Traceback" not in last
    engine = server.engine
    assert engine is not None
    wait_until(lambda: not engine.programs)


def test_ctrl_c_before_the_first_prompt_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(HANGING_S)
        with terminal("chat", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}") as screen:
            asked, _ = silent.accept()
            with asked:
                asked.recv(1)  # the chat waits for an answer now
                screen.press("c")
                assert screen.wait_end() == (130, "^Cphloem: error: interrupted\n")


def test_an_engine_of_its_own_answers(tiny_model_path: Path) -> None:
    flags = ("--max-tokens", "5", "--temperature", "0", "--precision", "float32")
    done = piped("one\ntwo\n/stats\n", str(tiny_model_path), *flags)
    assert done.returncode == 0
    assert f"model {tiny_model_path}" in done.stdout and "2 answers, 10 tokens" in done.stdout
    assert done.stderr.count("phloem: note: the answer is cut after 5 tokens; /set max_tokens allows more\n") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9: [Errno 111] Connection refused; is a server running there?"),  # noqa: E501
        (["--url", "ftp://x"], "'ftp://x': must begin with http://, https://, tcp:// or ipc://"),
        (["--url", "http://x", "--max-running", "3"], "--max-running is of a new engine, but --url names a running one; leave it out"),  # noqa: E501
        (["--api-key", "k"], "--api-key: an engine of this process takes no key; give --url too, or leave it out"),
        (["--json-schema", "/no/such"], "/no/such: No such file or directory"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line(flags: list[str], message: str) -> None:
    done = piped("", *flags)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert done.stderr == f"phloem: error: {message}\n"


def test_a_model_that_a_server_does_not_have_is_refused_with_those_that_it_has(server: Served) -> None:
    done = piped("", "oak", "--url", server.url)
    assert (done.returncode, done.stderr) == (2, f"phloem: error: {server.url} does not serve 'oak'; it has: string\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a conversation"),
        ('{"messages": [{"role": "cook", "content": "a"}]}', "message 0: its role is one of system, user, assistant"),
        ('{"messages": [{"role": "user", "content": 5}]}', "message 0: .* its content a text"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}', "message 1: a system"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Transcript.of_json(text)


def test_an_answer_cannot_command_the_terminal() -> None:
    assert visible("a\x1b[2Jb\tc\né\x9b\r") == "a\ufffd[2Jb\tc\né\ufffd\ufffd"
