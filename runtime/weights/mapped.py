"""Files that are mapped into memory to be read."""

import mmap
from pathlib import Path

from ...protocol.errors import UnknownModel


def map_file(path: Path) -> mmap.mmap:
    """Raises UnknownModel for an empty file. Copy on write: torch wants writable memory, and nothing here writes."""
    if not path.stat().st_size:
        raise UnknownModel(f"{path} is empty; fetch it again")
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def forget_pages(mapped: mmap.mmap) -> None:
    """Takes the pages that were read out of this process's memory, where the system can. Reading brings them back."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
