"""What Windows lacks is refused by name, and only where it is needed: Linux's modules and names are hidden here."""

import subprocess
import sys

import pytest

# What Python's own modules need of the system is imported before it is hidden.
WITHOUT = """
import asyncio, multiprocessing, os, select, signal, socket, subprocess, sys, tempfile
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for module, names in (
    (os, ("fork", "getloadavg", "getuid", "killpg", "sched_getaffinity", "setpriority", "sysconf")),
    (select, ("epoll", "poll")),
    (signal, ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "pthread_sigmask")),
    (socket, ("AF_UNIX",)),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"
from phloem import cli
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=120)


def test_the_language_imports_and_a_program_is_written_without_linux_s_modules():
    code = """
import phloem
@phloem.function
def ask(s, question):
    s += question + phloem.gen("answer")
assert callable(phloem.Runtime) and callable(phloem.connect)
print("written")
"""
    done = run(code)
    assert (done.returncode, done.stdout.strip()) == (0, "written"), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [("--help", "show what this machine can run"), ("serve --help", "--port"), ("doctor", "cores for this process")],
)
def test_help_and_doctor_need_nothing_that_windows_lacks(words: str, said: str):
    done = run(f"raise SystemExit(cli.main({words.split()!r}))")
    assert done.returncode == 0 and said in done.stdout, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(cli.main(['serve', 'no/such/model.gguf', '--port', '0']))",
        "import phloem\n"
        "try:\n    phloem.Runtime(model='no/such/model.gguf')\n"
        "except phloem.Unsupported as error:\n    sys.exit(f'error: {error}')",
    ],
)
def test_starting_an_engine_s_process_names_what_is_missing_and_what_to_do(code: str):
    done = run(code)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "lacks Unix sockets, select.poll, file descriptors passed to a child" in done.stderr
    assert "use Linux, macOS or the Windows Subsystem for Linux" in done.stderr


def test_a_pull_names_the_missing_lock_and_leaves_nothing(tmp_path):
    code = f"""
from pathlib import Path
from phloem.runtime.weights.pull import pull
try:
    pull("smollm2", home=Path({str(tmp_path)!r}))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = run(code)
    assert done.stdout.startswith("Unsupported smollm2 cannot be pulled on "), done.stderr
    assert "fcntl" in done.stdout and "give the path of a model file" in done.stdout
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
