"""The package as it is installed: every folder is in it, `import phloem` is cheap, and no module is loaded twice."""

import subprocess
import sys
import tomllib
from pathlib import Path

import phloem
import pytest

ROOT = Path(phloem.__file__).parent
NOT_SHIPPED = {"tests", "examples", "benchmarks", "docs", "deploy", "build", "dist"}


def run_fresh(code: str) -> str:
    """The output of ``code`` in a new process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def source_folders() -> set[Path]:
    tops = [top for top in ROOT.iterdir() if top.is_dir() and not is_left_out(top.name)]
    return {Path(), *(file.parent.relative_to(ROOT) for top in tops for file in top.rglob("*.py"))}


def is_left_out(top: str) -> bool:
    return top in NOT_SHIPPED or top.startswith(".")


def test_pyproject_lists_every_folder_that_holds_code() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = settings["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(".".join(("phloem", *folder.parts)) for folder in source_folders())


def test_every_folder_with_code_is_a_package() -> None:
    assert [folder for folder in source_folders() if not (ROOT / folder / "__init__.py").is_file()] == []


def test_every_other_file_beside_the_code_is_shipped_too() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"].get("package-data", {})
    missing = []
    for folder in source_folders() - {Path()}:
        package = ".".join(("phloem", *folder.parts))
        for file in (ROOT / folder).iterdir():
            if file.is_file() and file.suffix not in (".py", ".pyc", ".md"):
                shipped = any(file.match(pattern) for pattern in patterns.get(package, []))
                missing += [] if shipped else [str(folder / file.name)]
    assert missing == []


def test_import_phloem_loads_nothing_heavy() -> None:
    code = "import sys, phloem; print(sorted({'torch', 'numpy', 'msgspec', 'jinja2', 'tokenizers'} & set(sys.modules)))"
    assert run_fresh(code) == "[]\n"


def test_an_unknown_name_of_the_face_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"module 'phloem' has no attribute 'nope'; it has: "):
        phloem.nope


@pytest.mark.parametrize("name", [name for name in dir(phloem) if not name.startswith("__")])
def test_every_name_of_the_face_loads(name: str) -> None:
    assert getattr(phloem, name) is not None


def test_no_module_is_loaded_twice_under_two_names() -> None:
    import phloem.protocol.messages  # noqa: F401

    by_file: dict[str, set[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).is_relative_to(ROOT) and not is_left_out(Path(file).relative_to(ROOT).parts[0]):
            by_file.setdefault(file, set()).add(name)
    twice = {file: names for file, names in by_file.items() if len(names) > 1}
    # pytest loads the root under the checkout's name; that copy must hold no classes.
    for name in twice.pop(str(ROOT / "__init__.py"), {"phloem"}) - {"phloem"}:
        assert [value for value in vars(sys.modules[name]).values() if getattr(value, "__module__", "") == name] == [
            sys.modules[name].__getattr__,
            sys.modules[name].__dir__,
        ]
    assert twice == {}


def test_python_dash_m_phloem_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phloem", "--version"], capture_output=True, text=True, timeout=300, cwd="/"
    )
    assert (done.returncode, done.stdout) == (0, f"phloem {phloem.__version__}\n")
