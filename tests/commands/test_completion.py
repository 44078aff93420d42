"""``phloem completion``: the scripts, in a real bash."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from phloem import cli
from phloem.commands.completion import SHELLS, script
from phloem.commands.flags_of import actions_of, commands_of
from phloem.runtime.weights.aliases import ALIASES
from phloem.tests.commands.terminal import HANGING_S, terminal

BASH = shutil.which("bash") or "bash"


def commands() -> list[str]:
    return list(next(filter(None, map(commands_of, actions_of(cli.command_parser())))))


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "phloem.bash"
    file.write_text(script("bash", cli.command_parser(), tuple(ALIASES)))
    return file


def completed(file: Path, *words: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    ask = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _phloem"
    line = f'source {file}; {ask}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run([BASH, "--norc", "-c", line], capture_output=True, text=True, timeout=HANGING_S)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_flags_values_and_models(bash_script: Path) -> None:
    assert completed(bash_script, "phloem", "") == commands()
    assert completed(bash_script, "phloem", "se") == ["serve"]
    assert completed(bash_script, "phloem", "chat", "") == list(ALIASES)
    assert completed(bash_script, "phloem", "run", "--model", "smo") == ["smollm2"]
    assert completed(bash_script, "phloem", "serve", "smollm2", "--max-r") == [
        "--max-rebalanced",
        "--max-restarts",
        "--max-running",
    ]
    assert completed(bash_script, "phloem", "serve", "--order", "short") == ["shortest", "shortest_remaining"]
    assert completed(bash_script, "phloem", "serve", "--order", "=", "old") == ["oldest_program"]
    assert completed(bash_script, "phloem", "serve", "--port", "") == []
    assert completed(bash_script, "phloem", "keys", "") == ["new"]
    assert completed(bash_script, "phloem", "completion", "") == list(SHELLS)
    assert "--api-key" not in completed(bash_script, "phloem", "engine", "--")


def test_the_tab_key_completes_in_an_interactive_bash(bash_script: Path) -> None:
    with terminal("--norc", "--noprofile", "-i", program=[BASH]) as screen:
        screen.enter(f"PS1='ready> '; source {bash_script}; echo do''ne")
        screen.wait_for("done\nready> ")
        screen.type("echo phloem; phloem ser\t")
        screen.wait_for("phloem serve ")
        screen.type("smo\t")
        screen.wait_for("smollm2 ")
        screen.type("--prefill\t")
        screen.wait_for("--prefill-chunk ")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_flags_values_and_models(tmp_path: Path) -> None:
    file = tmp_path / "phloem.fish"
    file.write_text(script("fish", cli.command_parser(), tuple(ALIASES)))

    def offered(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", f"source {file}; complete -C {shlex.quote(line)}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANGING_S)
        assert done.stderr == ""
        return [found.split("\t")[0] for found in done.stdout.splitlines()]

    assert set(offered("phloem ")) >= set(commands())
    assert offered("phloem se") == ["serve"]
    assert set(offered("phloem chat smo")) >= {"smollm2"}
    assert offered("phloem run --model smo") == ["smollm2"]
    assert offered("phloem serve smollm2 --max-r") == [
        "--max-rebalanced",
        "--max-restarts",
        "--max-running",
    ]
    assert offered("phloem serve --order short") == ["shortest", "shortest_remaining"]
    assert offered("phloem keys n") == ["new"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_the_tab_key_completes_in_an_interactive_zsh(tmp_path: Path) -> None:
    file = tmp_path / "phloem.zsh"
    file.write_text(script("zsh", cli.command_parser(), tuple(ALIASES)))
    with terminal("-f", "-i", program=["zsh"]) as screen:
        screen.enter(f"PS1='ready> '; autoload -U compinit; compinit -D -u; source {file}; echo do''ne")
        screen.wait_for("done")
        screen.wait_for("ready> ")
        for typed, completed_to in (
            ("phloem ser\t", "phloem serve"),
            ("smo\t", "smollm2"),
            ("--prefill\t", "--prefill-chunk"),
            ("--order rand\t", "random"),
        ):
            screen.type(typed)
            screen.wait_for(completed_to)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_names_every_command_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert [name for name in (*commands(), *ALIASES) if name not in shown] == []
    assert ("-l prefill-chunk" if shell == "fish" else '"phloem serve --prefill-chunk"') in shown
    interpreter = shutil.which(shell)
    if interpreter is not None:
        done = subprocess.run([interpreter, "-n"], input=shown, capture_output=True, text=True, timeout=HANGING_S)
        assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["completion", "tcsh"])
    assert "invalid choice: 'tcsh' (choose from 'bash', 'zsh', 'fish')" in capsys.readouterr().err
