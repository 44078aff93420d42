"""``phloem run``: a program file on a model or a server, with Python's own tracebacks."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import phloem
import pytest
from phloem import cli
from phloem.tests.commands.terminal import HANGING_S, terminal
from phloem.tests.runtime.server.conftest import Served, serving
from phloem.tests.runtime.string_engine import StringEngine

EXAMPLES = Path(phloem.__file__).parent / "examples"
PROGRAM = """
import sys
import neighbour
import phloem

@phloem.function
def ask(s, question):
    s += phloem.user(question)
    s += phloem.assistant(phloem.gen("answer", max_tokens=9))

if __name__ == "__main__":
    print(sys.argv[1:], neighbour.NAME, ask.run("A colour?")["answer"])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving() as start:
        yield start(StringEngine(reply=lambda prompt, op: "Green."))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("NAME = 'beside'")
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_a_program_runs_on_the_server_of_the_command_line(
    server: Served, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (sys.modules["__main__"], sys.argv, sys.path, phloem.global_config.default_backend)
    assert cli.main(["run", "--url", server.url, str(program), "--words", "2"]) == 0
    assert capsys.readouterr() == ("['--words', '2'] beside Green.\n", "")
    assert (sys.modules["__main__"], sys.argv, sys.path, phloem.global_config.default_backend) == before
    assert "GivenRuntime" not in repr(phloem.Runtime)


def test_an_example_runs_unchanged_on_it(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--address", server.url, str(EXAMPLES / "chat.py"), "one", "two"]) == 0
    said = capsys.readouterr()
    assert said.out.count("Green.") == 2 and said.out.startswith("> one\n")
    assert said.err.count("the one of the command line takes its place\n") == 1


def test_without_a_choice_the_programs_own_runtime_is_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text("import phloem; print(phloem.Runtime)")
    assert cli.main(["run", str(tmp_path / "program.py")]) == 0
    assert capsys.readouterr() == ("<class 'phloem.engines.Runtime'>\n", "")


def test_a_program_runs_on_an_engine_that_starts_for_it(tiny_model_path: Path, program: Path) -> None:
    command = [sys.executable, "-m", "phloem", "run", "--model", str(tiny_model_path), str(program), "x"]
    done = subprocess.run(command, capture_output=True, timeout=HANGING_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"['x'] beside ")


@pytest.mark.parametrize("text", ["def f():\n    1 / 0\n\nf()\n", "a = = 1\n", "import no_such_module\n"])
def test_an_error_of_the_program_is_shown_as_python_shows_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(text)
    plain = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=HANGING_S)
    command = [sys.executable, "-m", "phloem", "run", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGING_S)
    assert (done.returncode, done.stdout, done.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_the_programs_exit_code_is_the_commands(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; sys.exit(7)")
    with pytest.raises(SystemExit) as end:
        cli.main(["run", str(tmp_path / "program.py")])
    assert end.value.code == 7


def test_a_missing_file_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "/no/such.py"]) == 2
    assert capsys.readouterr().err == "phloem: error: /no/such.py: No such file or directory\n"


def test_ctrl_c_is_one_line_and_code_130(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('begun', flush=True)\nwhile True:\n    pass\n")
    with terminal("run", str(tmp_path / "program.py")) as screen:
        screen.wait_for("begun\n")
        screen.press("c")
        code, last = screen.wait_end()
    assert code == 130 and last.endswith("phloem: error: interrupted\n") and "Traceback" not in last
