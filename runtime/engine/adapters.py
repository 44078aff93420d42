"""An engine's low-rank adapters by name: loaded and unloaded while programs run, each of which keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...protocol.errors import InvalidParams, LimitExceeded, UnknownModel, Unsupported
from ...protocol.messages import MAX_NAME
from ..weights.digest import weights_digest

MAX_ADAPTERS = 256  # at once; all of an engine's adapters share one tensor for each product

Put = Callable[[int, str, str], None]  # the executor's number, name and folder; without a name the number is freed


@dataclass(slots=True)
class _Loaded:
    name: str
    path: str
    space: str
    folder: Path
    num_programs: int = 0
    is_leaving: bool = False
    digest: str = ""


class Adapters:
    """``names`` can be chosen by new programs. An unloaded adapter stays until the last program that has it ends.

    A name's ``space`` keeps its cached prefixes apart from those of other adapters, also of one that had this name
    before.
    """

    def __init__(
        self, folders: Mapping[str, str], put: Put, *, root: str = "", refusal: str = "", has_disk: bool = False
    ) -> None:
        """``folders``: of the adapters that the engine was started with. ``root``: where later ones must be; empty: any
        folder. ``refusal``: why none can be loaded later; empty: they can. ``has_disk``: cached prefixes outlive the
        engine.
        """
        self._slots: list[_Loaded | None] = [_Loaded(name, path, name, Path(path)) for name, path in folders.items()]
        self._by_name = {one.name: i for i, one in enumerate(self._slots) if one is not None}
        self._put, self._root, self._refusal, self._has_disk = put, root, refusal, has_disk
        self._first_digests: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def listed(self) -> list[dict[str, object]]:
        """Name, folder and number of running programs, also of those that wait for their last program."""
        return [
            {"name": one.name, "path": one.path, "programs": one.num_programs, "unloading": one.is_leaving}
            for one in self._slots
            if one is not None
        ]

    def load(self, name: str, path: str) -> None:
        """Reads the folder ``path``. Raises InvalidParams, LimitExceeded, UnknownModel or Unsupported; then nothing has
        changed.
        """
        self._check_changes()
        if not name or len(name) > MAX_NAME or not name.isprintable():
            text = f"adapter name {name[:40]!r} of {len(name):,} characters; give 1 to {MAX_NAME} printable ones"
            raise InvalidParams(text, where="name")
        if name in self._by_name:
            text = f"adapter {name!r} is loaded already; unload it first, or choose another name"
            raise InvalidParams(text, where="name")
        if None not in self._slots and len(self._slots) >= MAX_ADAPTERS:
            raise LimitExceeded(
                f"{MAX_ADAPTERS} adapters are loaded, which is the limit; unload one first", where="name"
            )
        folder = self._allowed(path)
        index = self._slots.index(None) if None in self._slots else len(self._slots)
        self._put(index, name, str(folder))
        found = _Loaded(name, path, self._space_of(name, folder), folder)
        if index < len(self._slots):
            self._slots[index] = found
        else:
            self._slots.append(found)
        self._by_name[name] = index

    def unload(self, name: str) -> None:
        """New programs cannot choose ``name`` any more. Raises UnknownModel where it is not loaded."""
        self._check_changes()
        if name not in self._by_name:
            raise UnknownModel(f"adapter {name!r} is not loaded; there {self._there()}", where="name")
        index = self._by_name.pop(name)
        loaded = self._slots[index]
        assert loaded is not None
        loaded.is_leaving = True
        self._free(index, loaded)

    def digest_of(self, name: str) -> str:
        """Of the weights that a new program gets with ``name``; "" without a name. Raises UnknownModel."""
        if not name:
            return ""
        if name not in self._by_name:
            raise UnknownModel(f"adapter {name!r} is not loaded; there {self._there()}", where="name")
        loaded = self._slots[self._by_name[name]]
        assert loaded is not None
        loaded.digest = loaded.digest or weights_digest(loaded.folder)
        return loaded.digest

    def begin(self, name: str) -> tuple[int, str]:
        """A program that chose ``name`` begins: the executor's number and the space; -1 and "" without a name."""
        if not name:
            return -1, ""
        index = self._by_name[name]
        loaded = self._slots[index]
        assert loaded is not None
        loaded.num_programs += 1
        return index, loaded.space

    def end(self, index: int) -> None:
        """A program that began with the number ``index`` has ended."""
        loaded = self._slots[index] if index >= 0 else None
        if loaded is not None:
            loaded.num_programs -= 1
            self._free(index, loaded)

    def _free(self, index: int, loaded: _Loaded) -> None:
        if loaded.is_leaving and not loaded.num_programs:
            self._slots[index] = None
            self._put(index, "", "")

    def _there(self) -> str:
        return f"are {', '.join(self._by_name)}" if self._by_name else "are none"

    def _check_changes(self) -> None:
        if self._refusal:
            raise Unsupported(f"adapters are not loaded or unloaded while it runs: {self._refusal}", where="adapter")

    def _allowed(self, path: str) -> Path:
        try:
            folder = Path(self._root, path).resolve()
            is_there = bool(path) and folder.is_dir()
        except (OSError, ValueError):  # too long, or with a NUL
            is_there = False
        if self._root and not (is_there and folder.is_relative_to(Path(self._root).resolve())):
            text = f"adapter path {path[:200]!r} is no folder in {self._root} (--adapter-folder); put the adapter there"
            raise InvalidParams(text, where="path")
        if not is_there:
            raise InvalidParams(f"adapter path {path[:200]!r} is no folder; give one that PEFT has saved", where="path")
        return folder

    def _space_of(self, name: str, folder: Path) -> str:
        """The name, so that other engines name it alike, unless prefixes of other weights may be cached under it."""
        digest = weights_digest(folder)
        is_first = self._first_digests.setdefault(name, digest) == digest
        return name if is_first and not self._has_disk else f"{name} {digest}"
