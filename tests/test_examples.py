"""Every example runs on the real model and says what it should."""

import contextlib
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

    def run(name: str, *arguments: str, columns: int = 200) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments, "--model", str(smollm2_path)])
        monkeypatch.setenv("COLUMNS", str(columns))
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        importlib.import_module("phloem").set_default_backend(None)
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def runtime(smollm2_path):
    with importlib.import_module("phloem").Runtime(model=str(smollm2_path)) as runtime:
        yield runtime


@pytest.fixture
def one_engine(smollm2_path, runtime, monkeypatch):
    """``phloem.Runtime(model=...)`` of an example is the engine that serves all of them, with nothing in its cache."""

    def start(model: str) -> object:
        assert model == str(smollm2_path)
        runtime.flush_cache()
        return contextlib.nullcontext(runtime)

    monkeypatch.setattr(importlib.import_module("phloem"), "Runtime", start)


def test_quickstart_prints_right_answers_tokens_and_the_tree_in_80_columns(run):
    out = run("quickstart", columns=80)
    assert "The capital of France is Paris." in out and "Seine" in out
    assert "The pizza was cold and the waiter rude. food, angry, English" in out
    assert "Le vol était agréable et le repas délicieux. food, happy, French" in out
    (answer,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert answer == {"customer": "Paul Martin", "item": "wooden table", "quantity": 3, "price": 250}
    (header,) = [line for line in out.splitlines() if "program" in line and "┃" in line]
    names = [cell.strip() for cell in header.split("┃")[1:-1]]
    assert names == ["program", "messages", "prompt", "cached", "computed", "generated", "steps"]
    (chat_row,) = [line for line in out.splitlines() if line.startswith("│ chat")]
    messages, prompt, cached, computed, *_ = (int(cell) for cell in chat_row.split("│")[2:-1])
    assert messages == 1 and cached + computed == prompt and cached > 0
    assert "KV cache" in out and "used" in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.usefixtures("one_engine")
def test_classify_answers_for_every_sentence_with_a_shared_prompt(run):
    *answers, summary = run("classify").splitlines()
    assert {line.split()[0] for line in answers} <= {"English", "French", "German", "Spanish"} and len(answers) == 8
    right, _, _, _, cached, _, prompt, *_ = summary.replace(";", "").split()
    assert int(right) >= 6 and int(cached) > int(prompt) / 2


@pytest.mark.usefixtures("one_engine")
def test_extract_answers_follow_the_schema(run):
    forms = [json.loads(line) for line in run("extract").splitlines()]
    assert len(forms) == 3
    for form in forms:
        assert set(form) == {"name", "kind", "amount", "currency"} and form["amount"] >= 0
    assert [form["amount"] for form in forms[:2]] == [120.5, 80]


@pytest.mark.usefixtures("one_engine")
def test_chat_streams_and_finds_its_history(run):
    out = run("chat", "What is a tree?", "And a forest?")
    first, second = (line for line in out.splitlines() if "prompt tokens" in line)
    assert ", 0 of them cached" in first and ", 0 of them cached" not in second
    assert "> And a forest?" in out


@pytest.fixture
def lines(runtime, capsys):
    """``lines(name)`` is what ``main`` of ``examples/name.py`` prints, by lines; one engine serves all examples."""

    def lines(name: str) -> list[str]:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](runtime)
        return capsys.readouterr().out.splitlines()

    return lines


def test_few_shot_qa_answers_in_one_line_each(lines):
    *answers, summary = lines("few_shot_qa")
    assert len(answers) == 6 and "Paris" in answers[0]
    assert int(summary.split()[0]) >= 4


def test_react_carries_out_its_actions_and_finishes(lines):
    out = lines("react")
    assert sum(line.startswith("=> ") for line in out) == 3
    assert "Action: Lookup[Japan]" in out and "Observation: Tokyo" in out and "=> Tokyo" in out
    assert any(line.startswith("Action: Calculate[") for line in out)


def test_tree_of_thought_goes_on_from_the_best_of_different_steps(lines):
    task, *steps = lines("tree_of_thought")
    assert task == "Plan: plant a tree" and len(steps) == 12
    for level in range(3):
        part = steps[4 * level : 4 * level + 4]
        scores = [int(line.split("yes ")[1].split("%")[0]) for line in part]
        assert scores == sorted(scores, reverse=True) and part[0].startswith("*")
        assert len({line.split(": ", 1)[1] for line in part}) > 1, "proposals draw differently"


def test_tip_suggestion_writes_whole_sentences_in_one_message(lines):
    *sentences, messages = lines("tip_suggestion")
    assert len(sentences) == 3 and all(line.endswith(".") for line in sentences)
    assert messages == "(1 message)"


def test_llm_judge_marks_every_review(lines):
    out = lines("llm_judge")
    assert len(out) == 6 and out[1].startswith("  food good, service ")
    assert all(line.split()[1] == "stars," for line in (out[2], out[5]))


def test_multi_turn_chat_finds_its_history_in_the_cache(lines):
    out = lines("multi_turn_chat")
    counts = [
        tuple(int(word) for word in line.strip(" []").split() if word.isdigit()) for line in out if "cached" in line
    ]
    assert len(counts) == 6 and any("Rome" in line for line in out)
    for cached, prompt in (counts[1], counts[2], counts[4], counts[5]):
        assert cached > prompt / 2


def test_json_extraction_makes_objects(lines):
    out = lines("json_extraction")
    assert [line.split(":")[0].strip() for line in out[1::2]] == ["3 May", "24 December", "9 June"]
    assert "with Tom" in out[1] and "with Leo" in out[5]


def test_skeleton_of_thought_expands_every_point_in_one_message(lines):
    question, *points, messages = lines("skeleton_of_thought")
    assert question.endswith("?") and messages == "(1 message)"
    assert [line[:3] for line in points] == ["1. ", "2. ", "3. "] and all(line.endswith(".") for line in points)


def test_line_retrieval_reads_the_lines_once(lines):
    *answers, summary = lines("line_retrieval")
    assert len(answers) == 10 and all(line.split()[1].isdigit() for line in answers)
    words = summary.split()
    assert int(words[0]) >= 4 and int(words[4]) > 900


def test_parallel_sampling_votes(lines):
    question, *votes, winner = lines("parallel_sampling")
    assert question.endswith("?") and sum(int(line.split("x")[0]) for line in votes) == 32
    assert winner == "the vote: 11"


def test_cot_decoding_ranks_different_beginnings(lines):
    _, *answers = lines("cot_decoding")
    scores = [float(line.split()[0]) for line in answers]
    assert len(answers) >= 3 and scores == sorted(scores, reverse=True) and all(0 <= score <= 1 for score in scores)
    assert len({line.split()[1] for line in answers}) > 1
    assert "3" in answers[0]


def test_hellaswag_select_takes_the_likely_endings(lines):
    assert lines("hellaswag_select")[-1] == "4 of 4 right"


def test_decoding_votes_searches_and_says_how_sure_it_is(lines):
    vote, best, *beams, kind, raw = lines("decoding")
    assert vote.startswith("vote: 11 with ")
    highest, lowest = float(best.split("(")[1].split(",")[0]), float(best.rstrip(")").split()[-1])
    assert highest >= lowest and len(beams) == 4
    scores = [float(line.rsplit("(", 1)[1].rstrip(")")) for line in beams]
    assert scores == sorted(scores, reverse=True)
    sure = [[int(part.split("%")[0].split()[-1]) for part in line.split("happy ")[1:]] for line in (kind, raw)]
    assert sure[0][0] > sure[1][0]
