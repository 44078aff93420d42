"""Where KV blocks outlive an engine: a store of bytes by key, and the folder that is one.

A store knows nothing of KV. ``store_tier`` gives it its keys, ``<format>/<ab>/<ab...>.kv``, verifies what it reads and
bounds the store's size. Engines that use one store share their blocks.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

PART_S = 600.0  # a file that has been half written for so long was left by a process that ended


class StoreEntry(NamedTuple):
    """``used_s``: when it was last used, as far as the store knows; on the store's clock, to compare."""

    used_s: float
    num_bytes: int
    key: str


class BlockStore(Protocol):
    """Bytes by key. Every method may be called on any thread; errors of the place are OSError.

    ``is_near``: ``has_many`` takes microseconds, so the engine's thread may call it. ``num_readers``: how many reads
    the store answers at once. ``about``: what it is, for messages.
    """

    about: str
    is_near: bool
    num_readers: int

    def has_many(self, keys: Sequence[str]) -> list[bool]: ...

    def read(self, key: str) -> bytes | None:
        """None where there is nothing under ``key``."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """A reader sees all of ``data`` or nothing of it."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Keys that are not there are left out."""
        ...

    def entries(self) -> list[StoreEntry]:
        """Everything in the store, other engines' blocks too."""
        ...


class FolderStore:
    """Files below a folder. A file is written under another name and renamed. Raises OSError where none can be made."""

    is_near = True
    num_readers = 1

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.about = str(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._num_written = 0

    def has_many(self, keys: Sequence[str]) -> list[bool]:
        return [(self.folder / key).exists() for key in keys]

    def read(self, key: str) -> bytes | None:
        path = self.folder / key
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        return data

    def write(self, key: str, data: bytes) -> None:
        path = self.folder / key
        with self._lock:
            self._num_written += 1
            aside = path.with_suffix(f".{os.getpid()}-{id(self):x}-{self._num_written}.part")
        for folder in reversed(path.relative_to(self.folder).parents):
            (self.folder / folder).mkdir(mode=0o700, exist_ok=True)
        try:
            with aside.open("xb") as file:
                file.write(data)
            aside.replace(path)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            (self.folder / key).unlink(missing_ok=True)

    def entries(self) -> list[StoreEntry]:
        """Without files that another process deletes meanwhile; what a dead process left half written is deleted."""
        found: list[StoreEntry] = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder, name)
                with suppress(OSError):
                    stat = path.stat()
                    if name.endswith(".kv"):
                        found.append(StoreEntry(stat.st_mtime, stat.st_size, path.relative_to(self.folder).as_posix()))
                    elif name.endswith(".part") and stat.st_mtime < time.time() - PART_S:
                        path.unlink()
        return found
