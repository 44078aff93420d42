"""The process that compiles the walks of grammars. Here it finds them on disk, so it is done in seconds."""

import subprocess
import sys
from concurrent.futures import Future
from typing import Any

import pytest
from phloem import constrained
from phloem.constrained import compiling
from phloem.constrained.checker import byte_vocabulary
from phloem.constrained.spec import GrammarSpec
from phloem.runtime.engine.grammars import Grammars


class ByteTokenizer:
    def vocabulary(self) -> constrained.Vocabulary:
        return byte_vocabulary()


@pytest.fixture
def grammars() -> Any:
    tokenizer: Any = ByteTokenizer()
    made = Grammars(tokenizer, engine="phloem")
    yield made
    made.close()


def compiled(future: Future[constrained.CompiledGrammar]) -> str:
    return future.result(timeout=120).spec.text


def test_walks_that_ran_are_on_disk_and_no_process_is_begun() -> None:
    constrained.compile("regex", "a+", byte_vocabulary()).matcher().mask()
    assert compiling.are_on_disk()
    assert compiling.begin("auto") is None


def test_a_grammar_waits_for_the_process_which_ends_well(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[subprocess.Popen[bytes]]()
    begin = compiling.begin

    def noted(*args: Any) -> subprocess.Popen[bytes] | None:
        found = begin(*args)
        assert found is not None
        begun.append(found)
        return found

    monkeypatch.setattr(compiling, "are_on_disk", lambda: False)
    monkeypatch.setattr(compiling, "begin", noted)
    assert compiled(grammars.compile(GrammarSpec("regex", "[ab]c"))) == "[ab]c"
    (process,) = begun
    assert process.wait(timeout=60) == 0


def test_a_process_that_dies_leaves_the_work_to_the_engine(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "begin", lambda _: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    assert compiled(grammars.compile(GrammarSpec("regex", "[ab]d"))) == "[ab]d"


def test_closing_ends_the_process(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: Future[subprocess.Popen[bytes]] = Future()

    def begin(_: str) -> subprocess.Popen[bytes]:
        begun.set_result(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return begun.result()

    monkeypatch.setattr(compiling, "begin", begin)
    grammars.begin()
    process = begun.result(timeout=60)
    grammars.close()
    assert process.wait(timeout=60) != 0
    assert process.stdin is not None
    process.stdin.close()
