"""``phloem generate``: one answer to stdout, and its exit codes."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import phloem
import pytest
from phloem import cli
from phloem.flags import parse_choices
from phloem.protocol import ops
from phloem.tests.commands.terminal import HANGING_S, terminal
from phloem.tests.lang.fakes import ENDLESS
from phloem.tests.runtime.server.conftest import Served, serving
from phloem.tests.runtime.string_engine import StringEngine

asked: list[tuple[str, ops.Gen]] = []


def reply(prompt: str, op: ops.Gen) -> list[str]:
    asked.append((prompt, op))
    return [ENDLESS if "endless" in prompt else "Green it is."]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as start:
        yield start(StringEngine(reply=reply, step_s=0.02))  # Ctrl-C comes before an endless answer's limit


def test_an_answer_is_printed_and_asked_for_as_the_flags_say(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--system", "Be kind.", "--temperature", "0.5", "--stop", "x", "--stop", "y", "--logit-bias", "7=-1"]
    command = ["generate", "string", "Which colour?", "--url", server.url, *flags, "--no-skip-special-tokens"]
    assert cli.main([*command, "--seed", "3", "--stop-token-ids", "4,5"]) == 0
    assert capsys.readouterr() == ("Green it is.\n", "")
    prompt, op = asked[-1]
    assert "system\nBe kind.<|im_end|>" in prompt and "user\nWhich colour?<|im_end|>" in prompt
    params = op.params
    assert (params.temperature, params.stop, params.logit_bias, params.seed) == (0.5, ("x", "y"), {7: -1.0}, 3)
    assert (params.stop_token_ids, params.skip_special_tokens, params.max_tokens) == ((4, 5), False, 1024)


def test_an_engine_without_http_answers_at_its_address(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with phloem.Runtime(model=str(tiny_model_path), url=f"ipc://{tmp_path}/engine", num_slots=256) as runtime:
        command = ["generate", "default", "Which?", "--url", runtime.url]
        assert cli.main([*command, "--json", "--max-tokens", "3", "--ignore-eos"]) == 0
        assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] == 3
        assert cli.main(["generate", "oak", "Which?", "--url", runtime.url]) == 1
        assert f"{runtime.url} does not serve 'oak'; it has: " in capsys.readouterr().err
        for flags, pattern in (
            (["--regex", "[a-c]{3}"], r"[a-c]{3}\n"),
            (["--choices", "oak,elm"], r"(oak|elm)\n"),
            (["--raw", "--max-tokens", "3", "--temperature", "0"], r"[\s\S]+\n"),
        ):
            assert cli.main([*command, *flags]) == 0
            said = capsys.readouterr().out
            assert re.fullmatch(pattern, said), (flags, said)


def test_json_has_the_text_the_usage_and_the_reason_to_end(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "default", "A colour?", "--url", server.url, "--json", "--max-tokens", "2"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["finish_reason"], shown["model"]) == ("Green it", "length", "string")
    assert shown["usage"]["completion_tokens"] == 2 and shown["usage"]["prompt_tokens"] > 2


def test_a_cut_answer_is_noted(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "default", "A colour?", "--url", server.url, "--max-tokens", "2"]) == 0
    said = capsys.readouterr()
    assert said.out == "Green it\n"
    assert said.err == "phloem: note: the answer is cut after 2 tokens; --max-tokens allows more\n"


def test_an_engine_of_its_own_follows_a_grammar(tiny_model_path: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}))
    command = [sys.executable, "-m", "phloem", "generate", str(tiny_model_path), "-", "--json-schema", str(schema)]
    done = subprocess.run([*command, "--max-tokens", "40"], input=b"Which?", capture_output=True, timeout=HANGING_S)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r'\{.*"a"\s*:\s*[12].*\}\n', done.stdout.decode(errors="replace")), done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json-schema", "/no/such"], "/no/such: No such file or directory"),
        (["--choices", "a,b", "--top-k", "2"], "so top_k has no effect; leave it out"),
        (["--raw", "--system", "x"], "--system: plain text has no system message; leave out --raw or --system"),
        (["--min-tokens", "9", "--max-tokens", "5"], "min_tokens=9: must be between 0 and max_tokens"),
    ],
)
def test_an_error_is_one_line_and_code_1(
    tiny_model_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert cli.main(["generate", str(tiny_model_path), "Which?", *flags]) == 1
    said = capsys.readouterr()
    *_, last = said.err.splitlines()
    assert said.out == "" and last.startswith("phloem: error: ") and message in last


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-p", "3"], "argument --top-p: 3 is out of bounds; it must be in (0, 1]"),
        (["--max-tokens", "x"], "argument --max-tokens: 'x' is not a whole number"),
        (["--finish", "now"], "argument --finish: now is out of bounds; it must be closed or cut"),
        (["--choices", "a"], "argument --choices: 'a' is not two or more different texts"),
        (["--regex", "(a"], "argument --regex: '(a' is no regular expression: missing ), unterminated subpattern"),
        (["--regex", "a", "--choices", "a,b"], "argument --choices: not allowed with argument --regex"),
    ],
)
def test_a_wrong_flag_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["generate", "m", "Which?", *flags])
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"phloem: error: {message}")


def test_ctrl_c_is_one_line_and_code_130(server: Served) -> None:
    with terminal("generate", "default", "endless", "--url", server.url) as screen:
        screen.wait_for(" w w w")
        screen.press("c")
        code, last = screen.wait_end()
    assert code == 130 and last.endswith("phloem: error: interrupted\n") and "Traceback" not in last


@pytest.mark.parametrize("text", ["", "a", "a,", "a,a"])
def test_choices_are_two_or_more_different_texts(text: str) -> None:
    with pytest.raises(ValueError, match="for example yes,no"):
        parse_choices(text)
    assert parse_choices("oak,elm tree") == ("oak", "elm tree")
