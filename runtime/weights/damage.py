"""Files that are damaged or hostile: what reading them raises becomes one line that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...protocol.errors import UnknownModel, Unsupported

MOST_SHOWN = 80  # characters of a file's text in an error


@contextmanager
def refuse_damage(path: Path) -> Iterator[None]:
    """What Python and torch raise where the contents of ``path`` are no model's, as UnknownModel.

    Errors that name a part of the file keep to one line, whatever that part is. The sizes in a file are checked where
    they are read, before anything is made from them; this is for the rest.
    """
    try:
        yield
    except (UnknownModel, Unsupported) as error:
        if str(error).isprintable():
            raise
        raise type(error)(_one_line(str(error))) from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {shown(str(error))}"
        raise UnknownModel(
            f"{path} is damaged, or holds something else than a model ({what}); fetch it again"
        ) from error


def shown(text: str) -> str:
    """``text`` of a file for an error: printable, on one line, and short."""
    line = _one_line(text)
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}... ({len(text):,} characters)"


def _one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]
