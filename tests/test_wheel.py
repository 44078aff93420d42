"""The wheel and the source distribution: they hold every file of the package, and work where there is no checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import phloem
import pytest

ROOT = Path(phloem.__file__).resolve().parent
NOT_SHIPPED = {"tests", "examples", "benchmarks", "docs", "deploy", "build", "dist"}


def run(command: list[str], *, cwd: Path, path: Path | None = None, kernels: Path | None = None) -> str:
    """The output of ``command``, which finds packages in ``path``, kernels in ``kernels`` and the rest in itself."""
    # Without optimisation kernels take half of the time to compile.
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "NUMBA_OPT": "0"}
    environment |= {} if path is None else {"PYTHONPATH": str(path)}
    environment |= {} if kernels is None else {"NUMBA_CACHE_DIR": str(kernels)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a checkout has, because a build writes beside its source."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results", "data")
    return Path(shutil.copytree(ROOT, copy, ignore=skipped))


def build(kind: str, source: Path, into: Path) -> Path:
    """The one file that setuptools makes; no package index is asked."""
    program = f"import setuptools.build_meta as b; print(b.build_{kind}({str(into)!r}))"
    return into / run([sys.executable, "-c", program], cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def shipped() -> set[str]:
    """Every file of the package by its name in a wheel."""
    tops = [ROOT / "__init__.py", *ROOT.iterdir()]
    folders = [top for top in tops if top.is_dir() and top.name not in NOT_SHIPPED and not top.name.startswith(".")]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    files += ROOT.glob("*.py")
    return {
        f"phloem/{file.relative_to(ROOT)}"
        for file in files
        if file.suffix not in (".pyc", ".md") and "egg-info" not in str(file) and "__pycache__" not in file.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == shipped()


def test_a_wheel_of_the_source_distribution_is_the_same(source, wheel, tmp_path):
    sdist = build("sdist", source, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (folder for folder in tmp_path.iterdir() if folder.is_dir())
    again = build("wheel", unpacked, tmp_path)
    contents = [{e.filename: e.CRC for e in zipfile.ZipFile(file).infolist()} for file in (wheel, again)]
    for content in contents:
        content.pop(next(name for name in content if name.endswith("RECORD")))
    assert contents[0] == contents[1]


def test_an_installed_wheel_runs_outside_the_checkout(wheel, tiny_model_path, tmp_path, pytestconfig):
    kept = pytestconfig.cache.mkdir("wheel")  # a new place has no compiled kernels, and compiling them takes 25 s
    target, cwd = kept / "installed", tmp_path / "elsewhere"
    shutil.rmtree(target, ignore_errors=True)
    cwd.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet"]
    run([*pip, "--target", str(target), str(wheel)], cwd=cwd)
    for file in target.rglob("*.py"):  # numba keeps a kernel's code while its file has the same time and size
        changed_s = zlib.crc32(file.read_bytes())
        os.utime(file, (changed_s, changed_s))
    version = run([sys.executable, "-m", "phloem", "--version"], cwd=cwd, path=target)
    assert version == f"phloem {phloem.__version__}\n"
    program = (
        "import phloem\n"
        f"with phloem.Runtime(model={str(tiny_model_path)!r}, num_threads=1, speculative='off') as runtime:\n"
        "    text = runtime.generate('Once', max_tokens=8, temperature=0.0)\n"
        "print(phloem.__file__)\n"
        "print(len(str(text)) > 0)\n"
    )
    where, has_text = run([sys.executable, "-c", program], cwd=cwd, path=target, kernels=kept / "kernels").splitlines()[
        -2:
    ]
    assert (where, has_text) == (str(target / "phloem" / "__init__.py"), "True")


def test_the_version_is_one_and_the_changelog_has_it():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f'version = "{phloem.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {phloem.__version__}" in changelog
