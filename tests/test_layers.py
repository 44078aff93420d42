"""The layers: a folder imports only from lower layers. The table covers every import in the package, lazy ones too."""

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import phloem
import pytest

ROOT = Path(phloem.__file__).parent
NOT_LAYERED = {"tests", "examples", "benchmarks", "docs", "build", "dist"}

# Lowest first. A part imports from rows above its own line only, and from parts before it in a row that is a list.
ROWS: list[set[str] | list[str]] = [
    ["processor", "cpu_isa", "late_import", "numba_code"],
    {"kernels", "radix_cache", "constrained"},
    {"protocol"},
    {"lang", "runtime.config", "runtime.engine_socket"},
    ["runtime.server_args", "runtime.quant", "runtime.weights", "runtime.tokenizer"],
    {"runtime.memory", "runtime.scheduler"},
    {"runtime.layers"},
    ["runtime.models", "runtime.vision"],
    {"runtime.executor"},
    {"runtime.parallel"},
    {"runtime.speculative"},
    {"runtime.encoder", "runtime.engine"},
    ["runtime.process", "runtime.profiling", "runtime.planning", "runtime.quantizing"],
    {"cluster"},
    {"engines"},
    {"runtime.server"},
    {"cluster.ray"},
]
# The face may import everything; nothing imports the face, except for the package's own version.
FACE = {"__init__", "__main__", "cli", "commands", "doctor", "flags", "progress", "top"}
# These import less than their row would allow.
ONLY = {
    "protocol": {"constrained.spec"},
    "lang": {"protocol", "constrained.spec"},
    "runtime.config": {"protocol", "cpu_isa"},
    "runtime.engine_socket": {"protocol"},
}
# The language and the runtime meet in `engines` alone.
NOT_LANG = {"lang", "engines"}
# Circles that stay, each with the reason: the files that import one another.
CIRCLES: dict[frozenset[str], str] = {}
TORCH_FREE = [
    "phloem",
    "phloem.cli",
    "phloem.cpu_isa",
    "phloem.processor",
    "phloem.lang",
    "phloem.constrained",
    "phloem.radix_cache",
    "phloem.protocol",
    "phloem.runtime.config",
    "phloem.runtime.scheduler",
    "phloem.runtime.tokenizer",
    "phloem.runtime.weights.resolve",
    "phloem.cluster.index",
    "phloem.cluster.placement",
]


def allowed() -> dict[str, set[str]]:
    """For each part the parts it may import."""
    table, lower = {}, set[str]()
    for row in ROWS:
        for index, part in enumerate(row):
            before = set(row[:index]) if isinstance(row, list) else set()
            table[part] = ONLY.get(part, lower | before)
            if part.startswith("runtime."):
                table[part] = table[part] - NOT_LANG
        lower |= set(row)
    return table


ALLOWED = allowed()


def part_of(module: str) -> str | None:
    """The part of the house that ``module`` (a dotted name inside the package) belongs to."""
    names = module.split(".")
    for part in (".".join(names[:2]), names[0]):
        if part in ALLOWED or part in FACE:
            return part
    return None


def sources() -> Iterator[tuple[str, Path]]:
    for top in sorted(ROOT.iterdir()):
        if top.name not in NOT_LAYERED and not top.name.startswith("."):
            for file in [top] if top.suffix == ".py" else sorted(top.rglob("*.py")):
                yield ".".join(file.relative_to(ROOT).with_suffix("").parts), file


def imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name inside the package of everything of the package that ``module`` imports anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "phloem":
                    yield node.lineno, alias.name.removeprefix("phloem").lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                package = module.split(".")[: -node.level]
                assert node.level <= len(module.split(".")), f"{module}:{node.lineno} reaches above the package"
                base = ".".join([*package, *([node.module] if node.module else [])])
            elif (node.module or "").split(".")[0] == "phloem":
                base = (node.module or "").removeprefix("phloem").lstrip(".")
            else:
                continue
            for alias in node.names:
                yield node.lineno, resolved(base, alias.name)
        elif isinstance(node, ast.Call) and is_import_module(node.func) and isinstance(node.args[0], ast.Constant):
            name = str(node.args[0].value)
            if name.split(".")[0] == "phloem":
                yield node.lineno, name.removeprefix("phloem").lstrip(".")


@pytest.fixture(scope="module", autouse=True)
def _trees_are_no_garbage() -> Iterator[None]:
    """The trees of all files are millions of objects, which a collection would look at again and again. They have no
    cycles, so they go when nothing refers to them.
    """
    gc.disable()
    yield
    imports_of.cache_clear()
    tree_of.cache_clear()
    gc.enable()


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports_of(module: str, file: Path) -> tuple[tuple[int, str], ...]:
    return tuple(imports(module, tree_of(file)))


def resolved(base: str, name: str) -> str:
    """``from base import name``: the module ``base.name`` where that is one, otherwise ``base``."""
    inner = ROOT.joinpath(*base.split(".") if base else (), name)
    if inner.with_suffix(".py").is_file() or (inner / "__init__.py").is_file():
        return f"{base}.{name}".lstrip(".")
    return base


def is_import_module(func: ast.expr) -> bool:
    return getattr(func, "id", getattr(func, "attr", "")) in ("import_module", "_import_module", "__import__")


def violations(module: str, imported: Iterable[tuple[int, str]]) -> list[str]:
    part = part_of(module)
    if part is None:
        return [] if module == "runtime.__init__" else [f"{module} belongs to no part of the table"]
    found = []
    for line, target in imported:
        to = part_of(target)
        if part in FACE or to == part:
            continue
        fits = to is not None and any(target == ok or target.startswith(ok + ".") for ok in ALLOWED[part])
        if not fits:
            found.append(f"{module}:{line} imports {target or 'the face'}")
    return found


def test_every_import_goes_down_the_table() -> None:
    assert [fault for module, file in sources() for fault in violations(module, imports_of(module, file))] == []


@pytest.mark.parametrize(
    ("module", "source", "faults"),
    [
        ("runtime.scheduler.plan", "from ...radix_cache import Lease", 0),
        ("runtime.scheduler.plan", "def f():\n    from ..engine import Engine", 1),
        ("runtime.scheduler.plan", "def f():\n    import phloem.runtime.memory", 1),
        ("runtime.scheduler.plan", "from phloem.runtime import layers", 1),
        ("runtime.scheduler.plan", "from .. import executor, config", 1),
        ("runtime.weights.resolve", "from ..quant import QuantTensor", 0),
        ("runtime.weights.resolve", "from ..tokenizer import Tokenizer", 1),
        ("protocol.ops", "from ..constrained.spec import GrammarSpec", 0),
        ("protocol.ops", "from ..constrained.machine import x", 1),
        ("lang.expressions", "from ..protocol.ops import Gen", 0),
        ("lang.expressions", "from ..runtime.engine import Engine", 1),
        ("lang.expressions", "from .. import __version__", 1),
        ("radix_cache.tree", "from ..constrained import spec", 1),
        ("kernels.cpu.norm", "import_module('phloem.runtime.quant')", 1),
        ("runtime.server.app", "from ..engine import Engine\nfrom ...kernels import sample", 0),
        ("runtime.newcomer", "", 1),
        ("runtime.server.app", "from ...lang.tools.calls import ToolCall", 1),
        ("runtime.process.loop", "if TYPE_CHECKING:\n    from ...engines import Engine", 1),
        ("engines", "from .lang.gen import gen\nfrom .runtime.process import serve_engine", 0),
        ("cli", "from .runtime.server import serve", 0),
    ],
)
def test_the_guard_sees_every_kind_of_import(module: str, source: str, faults: int) -> None:
    assert len(violations(module, imports(module, ast.parse(source)))) == faults


def test_the_table_names_only_what_exists() -> None:
    modules = {module.removesuffix(".__init__") for module, _ in sources()}
    present = modules | {module.split(".")[0] for module in modules}
    named = (
        {part for row in ROWS for part in row} | {name for names in ONLY.values() for name in names} | FACE | NOT_LANG
    )
    assert named - present - {"__init__"} == set()


def import_graph() -> dict[str, set[str]]:
    """For each file the files it imports anywhere, under ``TYPE_CHECKING`` too."""
    files = dict(sources())
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        targets = {target for _, target in imports_of(module, file)}
        graph[module] = {name for target in targets for name in (target, f"{target}.__init__") if name in files}
    return graph


def circles(graph: dict[str, set[str]]) -> list[frozenset[str]]:
    """The strongly connected components of more than one file (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                found.append(frozenset(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_no_files_import_each_other_in_a_circle() -> None:
    unlisted = [sorted(circle) for circle in circles(import_graph()) if circle not in CIRCLES]
    assert unlisted == []
    assert set(CIRCLES) <= set(circles(import_graph())), "a circle that is listed is gone"


def test_circles_are_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [frozenset({"b", "c"})]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for module, file in sources():
        for node in tree_of(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_the_environment_is_read_by_the_command_line_alone() -> None:
    """`home` is an exception, as a program must find what the command has fetched. `pull` hands the environment on to
    pip, `child` to an engine's process, and `cpu_isa` sets the two variables that restrict torch, which has no
    other way.
    """
    readers = set()
    for module, file in sources():
        if not re.search("environ|getenv", file.read_text()):
            continue
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                readers.add(module)
    assert readers <= {
        "cli",
        "cpu_isa",
        "runtime.parallel.child",
        "runtime.weights.home",
        "runtime.weights.pull",
    }


@pytest.mark.parametrize("module", TORCH_FREE)
def test_no_torch_is_imported_by(module: str) -> None:
    code = (
        f"import importlib, pkgutil, sys\nmodule = importlib.import_module({module!r})\n"
        "if module.__name__ != 'phloem':\n"
        "    for found in pkgutil.walk_packages(getattr(module, '__path__', []), module.__name__ + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd="/")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize("module", ["phloem.lang.api", "phloem.engines", "phloem.runtime.server.app", "phloem.cli"])
def test_a_client_of_an_engine_loads_no_compiler(module: str) -> None:
    """A compiler would cost half a second and a hundred megabytes in every program that connects to an engine."""
    code = f"import importlib, sys\nimportlib.import_module({module!r})\nprint('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd="/")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize("package", ["constrained.json", "constrained.machine"])
def test_the_rest_of_the_package_knows_a_subpackage_by_its_interface_alone(package: str) -> None:
    inside = [
        f"{module}:{line} imports {target}"
        for module, file in sources()
        if not module.startswith(package + ".")
        for line, target in imports_of(module, file)
        if target.startswith(package + ".")
    ]
    assert inside == []


# Names with an underscore that their owners document.
DOCUMENTED = {"_exit", "_getframe", "_repr_html_"}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names of others that a test reads: a test of those would hold the product to how it works inside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED:
                yield f"{node.lineno}: {name}"


def test_tests_read_public_names_alone() -> None:
    found = {
        str(file.relative_to(ROOT)): names
        for file in sorted((ROOT / "tests").rglob("*.py"))
        if re.search(r"(?<!\w)_(?!_)", file.read_text()) and (names := list(private_names(tree_of(file))))
    }
    assert found == {}


def test_private_names_are_seen() -> None:
    source = "from phloem.cli import _main, main\nengine._tree.nodes\nself._mine\nstate._repr_html_()\nx.__class__"
    assert list(private_names(ast.parse(source))) == ["1: _main", "2: _tree"]
