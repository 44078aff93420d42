"""KV blocks as files, by name, up to a number of bytes; shared by engines on one host and kept over restarts.

    <folder>/<format>/<ab>/<ab...>.kv  =  MAGIC, format [16], name [16], checksum [16], the block's bytes

``format`` identifies everything that the bytes depend on: model, layers, heads, number format. A file is written under
another name and renamed, so a reader sees a whole file or none. A file that does not verify is ignored, and replaced
when its block is saved again.
"""

import logging
import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Lock

from .events import BlockEvents

MAGIC = b"phloem kv block 1\n"
_HASH_BYTES = 16
_HEADER_BYTES = len(MAGIC) + 3 * _HASH_BYTES

log = logging.getLogger(__name__)


class DiskTier:
    """Deletes the least recently read or written files first. Several threads and processes may use it at once.

    ``events``, if set, is told of each block that this object writes or deletes: not of those of other processes.
    """

    def __init__(self, folder: str | Path, *, format: str, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}: the disk tier needs room for at least 1 byte")
        self.max_bytes = max_bytes
        self._format = _digest(format.encode())
        self.folder = Path(folder) / self._format.hex()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.events: BlockEvents | None = None
        self._lock = Lock()
        self._unsound: set[bytes] = set()  # names of blocks whose files did not verify
        self._num_written = 0
        self.size_bytes = sum(size for _, size, _ in self._scan())

    def __contains__(self, name: bytes) -> bool:
        return name not in self._unsound and self.path_of(name).exists()

    def names(self) -> tuple[bytes, ...]:
        """Of the blocks that have a file, whichever process wrote it. Reads the whole folder."""
        found = (_name_of(path) for _, _, path in self._scan())
        return tuple(name for name in found if name is not None and name not in self._unsound)

    def read(self, name: bytes) -> bytes | None:
        """The block's bytes; None if it has no file that verifies."""
        path = self.path_of(name)
        if name in self._unsound:
            return None
        try:
            raw = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._ignore(name, str(error))
            return None
        block = memoryview(raw)[_HEADER_BYTES:]
        if not raw.startswith(MAGIC):
            self._ignore(name, "it is not a file of this cache")
            return None
        if raw[:_HEADER_BYTES] != self._header(name, block):
            self._ignore(name, "its checksum, name or format does not verify")
            return None
        return bytes(block)

    def write(self, name: bytes, block: bytes) -> bool:
        """Write the block; False on an error of the file system, which is logged."""
        path = self.path_of(name)
        with self._lock:
            self._num_written += 1
            aside = path.with_suffix(f".{os.getpid()}-{id(self):x}-{self._num_written}.part")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with aside.open("xb") as file:
                file.write(self._header(name, block))
                file.write(block)
            aside.replace(path)
        except OSError as error:
            with suppress(OSError):
                aside.unlink()
            log.warning("kv block %s not written to %s: %s", name.hex(), self.folder, error)
            return False
        with self._lock:
            self._unsound.discard(name)
            if self.events is not None:
                self.events.kept("disk", name)
            self.size_bytes += _HEADER_BYTES + len(block)
            if self.size_bytes > self.max_bytes:
                self._trim()
        return True

    def _trim(self) -> None:
        """Count all files, those of other engines too. Beyond the limit delete the oldest, down to 90% of the limit."""
        files = sorted(self._scan())
        self.size_bytes = sum(size for _, size, _ in files)
        if self.size_bytes <= self.max_bytes:
            return
        for _, size, path in files:
            if self.size_bytes <= self.max_bytes - self.max_bytes // 10:
                break
            with suppress(OSError):
                Path(path).unlink()
            self.size_bytes -= size
            name = _name_of(path)
            if self.events is not None and name is not None:
                self.events.dropped("disk", name, "space")

    def _scan(self) -> list[tuple[float, int, str]]:
        """(last use, bytes, path) of every block's file; files that another process deletes meanwhile are left out."""
        found = []
        for folder in self.folder.iterdir():
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):
                        if entry.name.endswith((".kv", ".part")):
                            stat = entry.stat()
                            found.append((stat.st_mtime, stat.st_size, entry.path))
        return found

    def path_of(self, name: bytes) -> Path:
        text = name.hex()
        return self.folder / text[:2] / f"{text}.kv"

    def _header(self, name: bytes, block: bytes | memoryview) -> bytes:
        return MAGIC + self._format + name + _digest(block)

    def _ignore(self, name: bytes, reason: str) -> None:
        self._unsound.add(name)
        if self.events is not None:
            self.events.dropped("disk", name, "unsound")
        log.warning("kv block %s ignored: %s: %s", name.hex(), self.path_of(name), reason)


def _name_of(path: str) -> bytes | None:
    """The block's name; None for a file that is being written or is none of ours."""
    name, dot, ending = os.path.basename(path).rpartition(".")
    try:
        return bytes.fromhex(name) if dot and ending == "kv" else None
    except ValueError:
        return None


def _digest(data: bytes | memoryview) -> bytes:
    return blake2b(data, digest_size=_HASH_BYTES).digest()
