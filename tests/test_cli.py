"""The command line: every setting has a flag, and a user's mistake is one line and exit code 2."""

import argparse
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from phloem import cli
from phloem.cluster.restarts import RestartPolicy
from phloem.commands.flags_of import actions_of, commands_of
from phloem.flags import ENGINE_HELP
from phloem.processor import num_cores
from phloem.protocol.errors import EngineLost, InvalidRequest
from phloem.protocol.model_rules import ModelRule, When
from phloem.runtime.config import EngineConfig
from phloem.runtime.server import serve
from phloem.runtime.server.lifetime import shared_out

Served = dict[str, Any]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A path that resolves; nothing here loads it."""
    (tmp_path / "m.gguf").touch()
    return str(tmp_path / "m.gguf")


class EarlyProcess:
    """In place of a process."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules, self.num_discards = modules, 0

    def discard(self) -> None:
        self.num_discards += 1


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """What ``serve`` was called with; the real server has tests of its own."""
    calls: Served = {}

    def serve(config: EngineConfig, **options: Any) -> int:
        calls.update(config=config, **options)
        return 0

    monkeypatch.setattr("phloem.runtime.server.serve", serve)
    monkeypatch.setattr("phloem.runtime.process.python_process.PythonProcess", EarlyProcess)
    monkeypatch.delenv("PHLOEM_API_KEY", raising=False)
    return calls


def test_serve_takes_every_setting_of_the_engine(model: str, served: Served) -> None:
    wanted = EngineConfig(model)
    flags = []
    for field in msgspec.structs.fields(EngineConfig):
        if field.name in ("model", "node_rank"):  # another machine than the first runs ranks and serves nothing
            continue
        flag, value = f"--{field.name.replace('_', '-')}", getattr(wanted, field.name)
        if isinstance(value, bool):
            flags.append(flag if not value else flag.replace("--", "--no-", 1))
            value = not value
        else:
            value = {
                "precision": "int4",
                "kv_dtype": "bfloat16",
                "log_level": "error",
                "grammar_engine": "xgrammar",
                "speculative": "off",
                "cuda_graphs": "off",
                "overlap": "off",
                "weights": "random",
                "gpu_memory_fraction": 0.5,
                "cache_format": "int8",
                "cached_prompts": "last",
                "eviction": "lru",
                "order": "shortest",
                "cpu_isa": "portable",
                "adapters": {"poet": "adapters/poet=1"},
                "draft_adapters": {"poet": "adapters/little-poet"},
                "tenant_weights": {"garden": 2.0, "a=b": 1.0},
            }.get(field.name, type(value)(7) if isinstance(value, int | float) else "other")
            shown = ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            flags += [flag, shown]
        wanted = msgspec.structs.replace(wanted, **{field.name: value})
    assert cli.main(["serve", model, *flags]) == 0
    assert served["config"] == wanted


def test_serve_starts_the_first_engine_s_interpreter_before_the_server_loads(
    model: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr("phloem.cluster.supervisor.Supervisor", lambda first, **_: found.append(first))
    cli.main(["serve", model])
    served["supervise"]()
    assert "torch" in found[0].modules and found[0].num_discards == 1
    cli.main(["serve", model, "--cpu-isa", "portable"])  # to be chosen before torch is loaded
    served["supervise"]()
    assert found[1] is None


def test_serve_passes_its_own_options_on(model: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["serve", model]) == 0
    assert (served["host"], served["port"], served["api_key"]) == ("127.0.0.1", 8000, None)
    monkeypatch.setenv("PHLOEM_API_KEY", "from the environment")
    cli.main(["serve", model])
    assert served["api_key"] == "from the environment"
    cli.main(["serve", model, "--host", "::1", "--port", "0", "--api-key", "k", "--cors-origin", "http://a"])
    assert (served["host"], served["port"], served["api_key"], served["cors_origins"]) == ("::1", 0, "k", ["http://a"])
    assert (served["replicas"], served["policy"]) == (1, RestartPolicy())
    cli.main(["serve", model, "--replicas", "3", "--step-timeout-s", "7.5", "--max-restarts", "0"])
    assert (served["replicas"], served["policy"]) == (3, RestartPolicy(step_timeout_s=7.5, max_restarts=0))


def test_serve_says_how_many_programs_may_move(model: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr("phloem.cluster.supervisor.Supervisor", lambda limits, **_: found.append(limits.max_rebalanced))
    for arguments in ([], ["--max-rebalanced", "0"]):
        cli.main(["serve", model, *arguments])
        served["supervise"]()
    assert found == [4, 0]


class Engines:
    def ask(self, what: str, timeout_s: float) -> dict[str, Any]:
        return {"0": {what: True, "cpu_isa": "avx2"}}


def test_a_ready_server_tells_its_address_and_what_its_engine_says(
    model: str, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "NVIDIA_DEVICE", tmp_path / "none")
    monkeypatch.setattr(cli, "_supervise", lambda args, first: lambda *given, **options: Engines())
    assert cli.main(["serve", model]) == 0
    served["supervise"](None)
    served["on_ready"]("http://here")
    assert "at http://here, precision auto, CPU kernels of avx2 (Ctrl-C" in capsys.readouterr().out
    monkeypatch.setattr(Engines, "ask", lambda self, what, timeout_s: {})
    served["on_ready"]("http://here")
    assert "at http://here, precision auto (Ctrl-C" in capsys.readouterr().out
    monkeypatch.setattr(cli, "NVIDIA_DEVICE", tmp_path)
    served["on_ready"]("http://here")
    assert "auto; this machine has an NVIDIA GPU, which --device cuda uses (Ctrl-C" in capsys.readouterr().out


def test_a_server_on_a_gpu_says_so(
    model: str, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_supervise", lambda args, first: lambda *given, **options: Engines())
    assert cli.main(["serve", model, "--device", "cuda:1"]) == 0
    served["supervise"](None)
    served["on_ready"]("http://here")
    assert "at http://here, precision auto, device cuda:1 (Ctrl-C" in capsys.readouterr().out


def test_every_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert done.value.code == 0
    assert [f for f in EngineConfig.__struct_fields__ if f"--{f.replace('_', '-')}" not in shown and f != "model"] == []
    assert set(ENGINE_HELP) == set(EngineConfig.__struct_fields__) - {"model"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "99999"], "99999 is not a port"),
        (["--max-running", "-1"], "-1 is negative; give 0 or more"),
        (["--client-timeout-s", "0"], "0: must be above 0, and not inf"),
        (["--precision", "int3"], "invalid choice: 'int3'"),
        (
            ["--max-runing", "3"],
            "unrecognized arguments: --max-runing 3; did you mean --max-running; see phloem serve --help",
        ),
        (["--frob"], "unrecognized arguments: --frob; see phloem serve --help"),
        (
            ["--max-restrats=3", "more"],
            "unrecognized arguments: --max-restrats=3 more; did you mean --max-restarts; see phloem",
        ),
        (["--num-slots", "many"], "'many' is not a whole number"),
        (["--tenant-weights", "garden"], "'garden' is not NAME=WEIGHT"),
        (["--replicas", "0"], "0 is too few; give 1 or more"),
        (["--step-timeout-s", "inf"], "inf: must be above 0, and not inf"),
        (["--max-restarts", "-1"], "-1 is negative; give 0 or more"),
    ],
)
def test_a_wrong_flag_is_named(
    model: str, served: Served, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["serve", model, *flags])
    assert done.value.code == 2 and not served
    said = capsys.readouterr().err
    assert message in said and said.startswith("phloem: error: ") and said.count("\n") == 1


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

MODULE = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
from phloem.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("phloem.cli", "doctor"),
        ("phloem.flags", "doctor"),
        ("phloem.runtime.planning", "plan"),
        ("phloem.doctor", "doctor"),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_one_line_and_code_130(module: str, command: str) -> None:
    """Ctrl-C in the first seconds printed 26 to 42 lines of traceback."""
    arguments = [sys.executable, "-c", INTERRUPTED_IMPORT, module, command]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "phloem: error: interrupted\n")


RULES = '[auto]\ncheap = "small"\nstrong = "large"\nwhen = {longer_than_chars = 9}\n'


def test_serve_takes_several_models_by_name_and_rules(model: str, served: Served, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "config.toml").write_text(f'models = ["large={model}"]\nnum-slots = 64\n')
    files = ["--rules", str(tmp_path / "rules.toml"), "--config", str(tmp_path / "config.toml")]
    for given in ([f"small={model}", f"large={model}", *files[:2], "--num-slots", "64"], [f"small={model}", *files]):
        assert cli.main(["serve", *given]) == 0
        wanted = EngineConfig(model, num_slots=64)
        assert (served["model_name"], served["config"]) == ("small", wanted)
        assert served["others"] == {"large": wanted}
        assert served["rules"] == {"auto": ModelRule(cheap="small", strong="large", when=When(longer_than_chars=9))}
    assert cli.main(["serve", f"small={model}"]) == 0
    assert (served["model_name"], served["config"].model, served["others"]) == ("small", model, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a=MODEL", "a=MODEL"], "'a' is the name of two models; give each its own"),
        (["MODEL", "MODEL"], "'m.gguf' is the name of two models"),
        (["a=MODEL", "b=MODEL", "--model-name", "c"], "--model-name: it is for one model, but 2 are given"),
        (["a=MODEL", "b=MODEL", "--on", "ray"], "--on ray: it is for one model, but 2 are given"),
        (["a=MODEL", "--model-name", "c"], "--model-name c: 'a=MODEL' names the model already"),
        (["a=MODEL", "b=MODEL", "--rules", "no.toml"], "rules no.toml: No such file or directory"),
        (["a=MODEL", "b=MODEL", "--rules", "WRONG"], "rules WRONG: Object missing required field `cheap`"),
        (["a=MODEL", "b=MODEL", "--rules", "EMPTY"], "rules EMPTY: no rules; add a table for each"),
    ],
)
def test_models_and_rules_that_cannot_be_served_are_errors(
    given: list[str], message: str, model: str, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.toml").write_text('[auto]\nstrong = "a"')
    (tmp_path / "empty.toml").write_text("")
    real = {"MODEL": model, "WRONG": str(tmp_path / "wrong.toml"), "EMPTY": str(tmp_path / "empty.toml")}

    def filled(text: str) -> str:
        for name, value in real.items():
            text = text.replace(name, value)
        return text

    assert cli.main(["serve", *map(filled, given)]) == 2
    assert filled(message) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            ModelRule(cheap="a", strong="huge", when=When(longer_than_chars=9)),
            "rule 'auto', strong: 'huge' is not served",
        ),
        (
            ModelRule(cheap="a", strong="a", when=When(longer_than_chars=9)),
            "rule 'auto', strong: 'a' is the cheap model",
        ),
    ],
)
def test_a_rule_is_checked_before_a_model_loads(rule: ModelRule, message: str) -> None:
    one = EngineConfig("/no/such/model")
    with pytest.raises(InvalidRequest, match=message):
        serve(one, model_name="a", others={"b": one}, rules={"auto": rule}, port=0)


def test_several_models_share_out_the_cores_and_refuse_what_one_alone_can_have() -> None:
    configs = shared_out({"a": EngineConfig("x"), "b": EngineConfig("y", num_threads=3)}, replicas=1)
    assert configs["a"].num_threads == max(1, num_cores() // 2)
    assert configs["b"].num_threads == 3
    for field, value in (("adapters", {"x": "/y"}), ("cache_events_url", "ipc:///x")):
        with pytest.raises(InvalidRequest, match="2 models|adapter 'x': it fits one of 2 models"):
            shared_out({"a": EngineConfig("x", **{field: value}), "b": EngineConfig("y")}, replicas=1)


def raising(error: Exception) -> Callable[..., int]:
    def serve(config: EngineConfig, **options: Any) -> int:
        raise error

    return serve


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InvalidRequest("port 8000 is in use"), 2, "port 8000 is in use"),
        (EngineLost("the engine ended with code 1"), 1, "the engine ended with code 1"),
        (
            OSError(errno.EADDRINUSE, "Address already in use"),
            2,
            "Address already in use; choose another --host or --port",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/models/oak"), 2, "/models/oak: Permission denied"),
    ],
)
def test_an_error_is_one_line_and_code_2_and_a_lost_engine_code_1(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("phloem.runtime.server.serve", raising(error))
    assert cli.main(["serve", model]) == code
    assert capsys.readouterr().err == f"phloem: error: {message}\n"


def test_a_fault_of_ours_is_not_hidden(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.runtime.server.serve", raising(KeyError("x")))
    with pytest.raises(KeyError):
        cli.main(["serve", model])


@pytest.mark.parametrize("command", [["pull"], ["serve"], ["engine", "--url", "ipc:///tmp/x"]])
def test_an_unknown_model_is_one_line_and_code_2(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command[0], "no-such-model", *command[1:]]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("phloem: error: no model 'no-such-model': ") and "smollm2" in said.err


def test_pull_prints_where_the_model_is(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", model]) == 0
    assert capsys.readouterr().out == model + "\n"


def test_a_grammar_is_checked_and_its_example_texts_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answer.regex"
    file.write_text("yes|y[a-z]s\n")
    assert cli.main(["grammar", str(file), "--text", "yes", "--text", "yas"]) == 0
    shown = capsys.readouterr().out
    assert "overlap: yes overlaps with y[a-z]s; both match 'yes'" in shown and "accepted: 'yas'" in shown
    assert cli.main(["grammar", str(file), "--text", "no"]) == 2
    assert "refused: 'no' stops after 0 of 2 characters; expected 'y'" in capsys.readouterr().out


def test_a_grammar_takes_options_and_its_tokens_are_those_of_the_model(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    assert cli.main(["grammar", str(file), "--option", "whitespace=compact", "--model", str(tiny_model_path)]) == 0
    assert capsys.readouterr().out.startswith("json_schema: compiled in ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.regex", "(a", "bad.regex: regex '(a', character 2: '(' is never closed"),
        ("bad.txt", "a", "bad.txt: the file's suffix names no kind of grammar; add --kind"),
        ("gone.lark", None, "gone.lark: No such file or directory"),
    ],
)
def test_a_grammar_that_cannot_be_read_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert cli.main(["grammar", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err == f"phloem: error: {tmp_path}/{message}\n"


def test_doctor_names_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("machine", "cpu features", "torch", "4-bit CPU linears", "CUDA", "smollm2"):
        assert word in shown


@pytest.mark.parametrize("value", ["", "1"])
def test_doctor_tells_whether_bytecode_is_kept(value: str) -> None:
    """Where it is not, torch's Python is compiled at every start, which takes seconds."""
    command = [sys.executable, "-m", "phloem", "doctor"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": value}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    (line,) = [line for line in done.stdout.splitlines() if "Python bytecode" in line]
    assert ("not kept (PYTHONDONTWRITEBYTECODE)" if value else "kept in __pycache__") in line and done.returncode == 0


def test_without_a_command_the_usage_is_shown() -> None:
    done = subprocess.run([sys.executable, "-m", "phloem"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "usage: phloem" in done.stderr and "Traceback" not in done.stderr


# -- real processes ---------------------------------------------------------------------------------------------------


def test_a_busy_port_is_one_line_and_code_2(tiny_model_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "phloem", "serve", str(tiny_model_path), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"phloem: error: port {port} on 127.0.0.1 is in use by another program; ")
    assert done.stderr.count("\n") == 1


def test_an_engine_runs_until_it_is_told_to_stop(tiny_model_path: Path, tmp_path: Path) -> None:
    import phloem

    url = f"ipc://{tmp_path}/engine"
    command = [sys.executable, "-m", "phloem", "engine", str(tiny_model_path), "--url", url, "--precision", "float32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"phloem runs {tiny_model_path} at {url}, precision float32, CPU kernels of "), line
            connection = phloem.connect(url)
            assert connection.welcome.vocab_size == 259
            connection.shutdown()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()  # nothing happens if it has ended


def test_every_default_may_be_given_explicitly():
    parser = cli.command_parser()
    commands = next(filter(None, map(commands_of, actions_of(parser))))
    num_checked = 0
    for name, (_, command) in commands.items():
        needed = [value for action in actions_of(command) for value in _needed(action)]
        for action in actions_of(command):
            if not action.option_strings or action.default in (None, argparse.SUPPRESS, {}, []):
                continue
            if isinstance(action, argparse.BooleanOptionalAction):
                given = [action.option_strings[0 if action.default else 1]]
            elif isinstance(action.default, bool):
                continue
            else:
                values = action.default if isinstance(action.default, list) else [action.default]
                given = [action.option_strings[0], *map(str, values)]
            assert getattr(parser.parse_args([name, *needed, *given]), action.dest) == action.default, (name, given)
            num_checked += 1
    assert num_checked > 50


def _needed(action):
    """The arguments without which a command cannot be parsed."""
    if not action.option_strings:
        return [next(iter(action.choices)) if action.choices else "x"] if action.nargs not in ("?", "*") else []
    return [action.option_strings[0], next(iter(action.choices or ["x"]))] if action.required else []


def test_reading_the_command_line_loads_no_heavy_library() -> None:
    """``--cpu-isa`` must be chosen before torch is loaded, and a command should start at once."""
    heavy = ("torch", "numba", "numpy", "llvmlite", "fastapi", "httpx", "rich", "tokenizers", "transformers")
    code = (
        f"import sys, phloem.cli; phloem.cli.command_parser(); print([name for name in {heavy} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_the_parser_of_one_command_is_that_of_all_commands() -> None:
    def helps(parser: argparse.ArgumentParser) -> dict[str, tuple[str, str]]:
        found = next(filter(None, map(commands_of, actions_of(parser))))
        return {name: (about, command.format_help()) for name, (about, command) in found.items()}

    every = helps(cli.command_parser())
    assert [helps(cli.command_parser(name)) for name in every] == [{name: texts} for name, texts in every.items()]
    assert helps(cli.command_parser("--version")) == every
