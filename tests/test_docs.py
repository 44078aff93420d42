"""The documentation is true: its code runs, its commands parse, and its links have targets.

Blocks fenced ``python`` run, those of a page in order in one namespace; a block fenced ``text`` right after one is what
it prints. ``py``, ``sh`` and ``console`` blocks are not run; of commands only their words are checked.
"""

import ast
import importlib
import inspect
import json
import re
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import get_args

import pytest
from phloem.commands.flags_of import actions_of, commands_of

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
_MODULE = re.compile(r"python -m ([\w.]+)")
_MODEL = re.compile(r"\b(Runtime|Engine)\(")


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int  # of the code's first line in the page
    printed: str | None  # what a text block right after it says


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(_FENCE.finditer(text))
    blocks = []
    for i, match in enumerate(found):
        after = found[i + 1] if i + 1 < len(found) else None
        is_answer = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        line = text.count("\n", 0, match.start(2)) + 1
        blocks.append(Block(match[1], match[2], line, after[2] if is_answer and after else None))
    return blocks


def _params() -> Iterator[object]:
    for page in PAGES:
        code = [block.code for block in blocks_of(page) if block.language == "python"]
        if code:
            marks = [pytest.mark.model] if _MODEL.search("".join(code)) else []
            yield pytest.param(page, id=page.stem if page in DOCS else page.name, marks=marks)


@pytest.fixture(scope="module")
def runtime(smollm2_path):
    with importlib.import_module("phloem.engines").Runtime(model=str(smollm2_path)) as runtime:
        yield runtime


@pytest.fixture
def shared_runtime(request, monkeypatch):
    """``phloem.Runtime("smollm2", ...)`` is one engine for all pages; what options it is given are checked."""
    phloem = importlib.import_module("phloem")
    make_config = importlib.import_module("phloem.engines").make_config

    def start(model: str | None = None, **options: object) -> object:
        assert make_config(model, options).model == "smollm2"
        runtime = request.getfixturevalue("runtime")
        monkeypatch.setattr(runtime, "shutdown", lambda: None)
        return runtime

    monkeypatch.setattr(phloem, "Runtime", start)
    yield
    phloem.set_default_backend(None)


@pytest.mark.parametrize("page", list(_params()))
def test_code_of_page_runs_and_prints_what_the_page_says(page, shared_runtime, monkeypatch, capsys, tmp_path):
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)  # classes look their annotations up there
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(page):
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.code, str(page), "exec", dont_inherit=True)
            exec(code, module.__dict__)
            out = capsys.readouterr().out
            if block.printed is not None:
                assert out.strip() == block.printed.strip(), f"{page.name}, line {block.line}"


def _commands(page: Path) -> Iterator[list[str]]:
    """The words of every command in the page's ``sh`` and ``console`` blocks."""
    for block in blocks_of(page):
        if block.language not in ("sh", "console"):
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            if block.language == "console" and not line.startswith("$ "):
                continue
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:  # a quote that goes on in the next line: the text of a request
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words := list(takewhile(lambda word: word not in ("|", ">", "<"), words)):
                yield words
    for line in re.findall(r"^    (phloem .*)$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        yield shlex.split(line, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_page_exist_and_parse(page):
    cli = importlib.import_module("phloem.cli")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in _commands(page):
        command = Path(words[0]).name
        if words[:3] == [words[0], "-m", "phloem"]:
            command, words = "phloem", words[2:]
        if command == "phloem" and len(words) > 1:
            try:
                cli.command_parser().parse_args([word for word in words[1:] if word not in ("&", "...")])
            except SystemExit as end:
                assert end.code == 0, f"{page.name}: {' '.join(words)}"
        elif command == "make":
            assert words[1] in targets, words
        elif command in ("python", "pytest"):
            for word in words[1:]:
                if "/" in word and not word.startswith(("-", "/")):
                    assert (ROOT / word.split("::")[0]).exists(), f"{page.name}: {word}"
    for name in _MODULE.findall(page.read_text()):
        place = ROOT.joinpath(*name.removeprefix("phloem.").split("."))
        stands = place.with_suffix(".py").exists() or (place / "__init__.py").exists()
        assert stands or name in ("phloem", "venv", "pip"), f"{page.name}: python -m {name}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_page_lead_somewhere(page):
    text = _FENCE.sub("", page.read_text())
    for target in _LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = page if not path else (page.parent / path)
        assert place.exists(), f"{page.name}: {target}"
        if anchor:
            anchors = {_anchor(heading) for heading in re.findall(r"^#+ (.*)$", place.read_text(), re.MULTILINE)}
            assert anchor in anchors, f"{page.name}: {target}"
    folders = {place.name for place in ROOT.iterdir() if place.is_dir()}
    for path in _PATH.findall(text):
        if path.split("/")[0] in folders:
            assert (ROOT / path).exists(), f"{page.name}: `{path}`"


_FUNCTION = re.compile(r"`([\w./]+\.py)`: `([\w.]+)`")


def definitions(file: Path) -> set[str]:
    """The functions and classes that ``file`` defines; methods and nested functions are ``Holder.name``."""
    found = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
                name = f"{prefix}{child.name}."
            visit(child, name)

    visit(ast.parse(file.read_text()), "")
    return found


@pytest.mark.parametrize(("page", "least"), [("tour", 10), ("faq", 10)])
def test_functions_that_a_page_names_exist(page: str, least: int) -> None:
    named = _FUNCTION.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert len(named) >= least
    assert [(file, name) for file, name in named if name not in definitions(ROOT / file)] == []


def test_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [page.name for page in DOCS if page.name != "README.md" and f"({page.name})" not in index]
    assert not missing
    assert "docs/README.md" in (ROOT / "README.md").read_text()


def test_the_readmes_table_is_what_was_measured():
    readme = (ROOT / "README.md").read_text()
    measured = json.loads((ROOT / "benchmarks" / "results" / "serving.json").read_text())
    assert measured["command"].removeprefix("python ") in readme
    rows = [
        re.findall(r"[\d,.]+", line) for line in readme[readme.index("## Measured") :].splitlines() if "ms |" in line
    ]
    assert len(rows) == len(measured["workloads"])
    for (*_, tokens_per_s, first_ms, token_ms, cached), found in zip(rows, measured["workloads"], strict=True):
        assert float(tokens_per_s.replace(",", "")) == round(median(found["tokens_per_s"])), found["workload"]
        assert float(first_ms.replace(",", "")) == round(found["ttft_p50_ms"]), found["workload"]
        assert abs(float(token_ms) - found["token_ms"]) <= (0.05 if "." in token_ms else 0.5), found["workload"]
        assert float(cached) == round(100 * found["cached_tokens"] / found["prompt_tokens"]), found["workload"]


def test_every_command_and_flag_of_the_engine_is_explained():
    page = (ROOT / "docs" / "operations.md").read_text()
    fields = importlib.import_module("phloem.runtime.config").EngineConfig.__struct_fields__
    assert not [name for name in fields if name != "model" and f"`--{name.replace('_', '-')}`" not in page]
    parser = importlib.import_module("phloem.cli").command_parser()
    commands = next(filter(None, map(commands_of, actions_of(parser))))
    assert not [name for name in commands if f"\nphloem {name}" not in page]


def test_every_operation_and_message_is_in_the_protocols_page():
    page = (ROOT / "docs" / "protocol.md").read_text()
    for module, union in (("ops", "AnyOp"), ("messages", "ClientMessage"), ("messages", "RuntimeMessage")):
        kinds = getattr(importlib.import_module(f"phloem.protocol.{module}"), union)
        tags = [kind.__struct_config__.tag for kind in get_args(kinds)]
        assert not [tag for tag in tags if f"`{tag}`" not in page]


@pytest.mark.model
def test_metrics_that_are_named_exist(runtime):
    page = (ROOT / "docs" / "operations.md").read_text()
    keys = importlib.import_module("phloem.runtime.server.tenants").Keys({})
    metrics = importlib.import_module("phloem.runtime.server.metrics").ServerMetrics(keys)
    metrics.errors.labels("overloaded")
    runtime.generate("One, two, one, two, one,", max_tokens=2)
    text = metrics.text({"0": runtime.metrics()}).decode()
    known = set(re.findall(r"^(?:# TYPE )?(phloem_\w+)", text, re.MULTILINE))
    named = set(re.findall(r"`(phloem_(?:http|engine|tenant)_\w+)", page))
    # There once somebody has guessed, and once a tier has been used.
    later = {name for name in named if name.endswith("_tokens_lookup") or "_tier_blocks_" in name}
    assert len(named) > 20 and not named - later - known


def test_the_dashboard_shows_metrics_that_exist():
    """Each is in the table of metrics, which is compared with a real engine's."""
    dashboard = json.loads((ROOT / "docs" / "grafana" / "phloem.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    page = (ROOT / "docs" / "operations.md").read_text()
    known = set(re.findall(r"\bphloem_\w+", page)) | {
        f"phloem_engine_slots_{n}" for n in ("cached", "locked", "leased")
    }
    named = {name.removesuffix("_bucket") for text in expressions for name in re.findall(r"\bphloem_\w+", text)}
    assert len(named) > 20 and not named - known
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_every_argument_of_gen_is_explained():
    page = (ROOT / "docs" / "language.md").read_text()
    names = inspect.signature(importlib.import_module("phloem").gen).parameters
    assert not [name for name in names if f"`{name}`" not in page and f"`{name}=" not in page and name != "name"]


def test_every_example_is_in_its_page():
    page = (ROOT / "docs" / "examples.md").read_text()
    examples = sorted((ROOT / "examples").rglob("*.py"))
    assert not [place.name for place in examples if f"../examples/{place.relative_to(ROOT / 'examples')}" not in page]


def test_every_public_name_is_in_some_page():
    text = "".join(page.read_text() for page in PAGES)
    names = importlib.import_module("phloem").__all__
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


def test_a_page_that_is_wrong_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# P\n\n```python\nprint(1)\n```\n\n```text\n2\n```\n\n```sh\nphloem serv x  # no such\n```\n")
    first, answer, command = blocks_of(page)
    assert (first.language, first.line, first.printed) == ("python", 4, "2\n")
    assert answer.printed is None and command.language == "sh"
    assert list(_commands(page)) == [["phloem", "serv", "x"]]
