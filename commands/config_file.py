"""The file of ``phloem serve --config``: TOML whose keys are the names of the command's flags."""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..protocol.errors import InvalidRequest
from .flags_of import actions_of, groups_of

_NOT_KEYS = frozenset(("help", "config", "print-config"))
_SECRETS = frozenset(("api_key",))


def parse_with_file(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, argv: Sequence[str], path: Path
) -> argparse.Namespace:
    """Parse ``argv`` again, with the file's values where no flag is given. ``command``: the parser of the sub-command.

    Raises InvalidRequest that names the file and the key.
    """
    values = read_config(path, command)
    before = {action: action.default for action in actions_of(command) if action.dest in values}
    for action in before:
        action.default = argparse.SUPPRESS  # so that a flag that is given can be told from one that is not
    try:
        args = parser.parse_args(argv)
    finally:
        for action, default in before.items():
            action.default = default
    for dest, value in values.items():
        if not hasattr(args, dest):
            setattr(args, dest, value)
    return args


def read_config(path: Path, command: argparse.ArgumentParser) -> dict[str, Any]:
    """The values of the file, by the flags' places in the parsed arguments."""
    if path.suffix in (".yaml", ".yml"):
        raise InvalidRequest(f"{path}: YAML is not read; write it as TOML, `key = value`, and name it {path.stem}.toml")
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # not UTF-8 or not TOML
        raise InvalidRequest(f"{path}: {error}") from None
    keys = _keys(command)
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            meant = f"did you mean {near[0]}?" if near else f"{command.prog} --help lists the flags"
            raise InvalidRequest(f"{path}: {key!r} is not a flag of {command.prog}; {meant}")
        action = keys[key]
        if action.dest in values:
            raise InvalidRequest(f"{path}: {key!r} is given twice, under two names; give it once")
        try:
            values[action.dest] = _value(action, value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise InvalidRequest(f"{path}: {key}: {error}") from None
    return values


def _keys(command: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Each flag by its names without dashes, and positional arguments by theirs."""
    found = {}
    for action in actions_of(command):
        names = [option.removeprefix("--") for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse.BooleanOptionalAction):
            names = names[:1]
        found.update(dict.fromkeys(names if action.option_strings else [action.dest], action))
    return {name: action for name, action in found.items() if name not in _NOT_KEYS}


def _value(action: argparse.Action, value: Any) -> Any:
    """``value`` as the flag would read it. Raises ValueError or ArgumentTypeError."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is not true or false")
        return value
    if isinstance(action.default, list):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{value!r} is not a list of texts")
        return items
    if isinstance(action.default, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not a table, for example {{ name = ... }}")
        return {name: _single(action, item) for name, item in value.items()}
    return _checked(action, _single(action, value))


def _single(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is not a {action.metavar or 'text'}")
    if isinstance(action.default, dict):  # NAME=WEIGHT or NAME=PATH
        if action.type is None:
            return str(value)
        if isinstance(value, str):
            raise ValueError(f"{value!r} is not a number")
        return float(value)
    read = action.type if callable(action.type) else str
    return read(str(value))


def _checked(action: argparse.Action, value: Any) -> Any:
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, action.choices))}")
    return value


# -- showing ----------------------------------------------------------------------------------------------------------


def config_text(command: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The settings of ``args`` as a file for ``--config``. What is not set is left out, and the API key is hidden."""
    return "".join(f"{line}\n" for line in _lines(command, vars(args)))


def _lines(command: argparse.ArgumentParser, values: Mapping[str, Any]) -> Iterator[str]:
    names = {id(action): name for name, action in reversed(_keys(command).items())}
    for title, actions in groups_of(command):
        shown = []
        for action in actions:
            name, value = names.get(id(action)), values.get(action.dest)
            if name is None or value is None:
                continue
            shown.append(f"# {name} is set" if action.dest in _SECRETS else f"{name} = {_toml(value)}")
        if shown:
            yield f"# {title}"
            yield from shown


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict):
        pairs = ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {_toml(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False)
