"""Every example runs on the real model and says what it should."""

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(smollm2_path, monkeypatch, capsys):
    """``run(name)`` runs ``examples/name.py`` as a user would and returns what it printed."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments, "--model", str(smollm2_path)])
        monkeypatch.setenv("COLUMNS", "200")
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        importlib.import_module("phloem").set_default_backend(None)
        return capsys.readouterr().out

    return run


def test_quickstart_prints_answers_costs_and_the_tree(run):
    out = run("quickstart")
    assert "Paris" in out and "Rome" in out
    assert "I loved every minute of it.  positive" in out and "What a waste of money.  negative" in out
    answer = json.loads(out[out.index("\n{") : out.index("\n}") + 2])
    assert set(answer) == {"city", "country", "founded", "coastal"} and isinstance(answer["founded"], int)
    (chat_row,) = [line for line in out.splitlines() if line.startswith("│ chat")]
    messages, prompt, cached, prefilled, *_ = (int(cell) for cell in chat_row.split("│")[2:-1])
    assert messages == 1 and cached + prefilled == prompt and cached > 0
    assert "KV cache" in out and "used" in out


def test_classify_answers_for_every_sentence_with_a_shared_prompt(run):
    *answers, summary = run("classify").splitlines()
    assert {line.split()[0] for line in answers} <= {"English", "French", "German", "Spanish"} and len(answers) == 8
    right, _, _, _, cached, _, prompt, *_ = summary.replace(";", "").split()
    assert int(right) >= 6 and int(cached) > int(prompt) / 2


def test_extract_answers_follow_the_schema(run):
    forms = [json.loads(line) for line in run("extract").splitlines()]
    assert len(forms) == 3
    for form in forms:
        assert set(form) == {"name", "kind", "amount", "currency"} and form["amount"] >= 0
    assert [form["amount"] for form in forms[:2]] == [120.5, 80]


def test_chat_streams_and_finds_its_history(run):
    out = run("chat", "What is a tree?", "And a forest?")
    first, second = (line for line in out.splitlines() if "prompt tokens" in line)
    assert "0 of them cached" in first and "0 of them cached" not in second
    assert "> And a forest?" in out
