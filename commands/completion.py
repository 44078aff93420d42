"""``phloem completion``: scripts that complete commands, flags and model names in a shell, made from the parser."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .flags_of import actions_of, commands_of, help_of

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class FlagWords:
    """``words``: the values that it takes, as far as they are known."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CommandWords:
    """A command with the words that lead to it. ``words``: what may follow besides flags."""

    path: tuple[str, ...]
    help: str
    flags: tuple[FlagWords, ...]
    words: tuple[str, ...]


def script(shell: str, parser: argparse.ArgumentParser, models: Sequence[str]) -> str:
    """The script for ``shell``. ``models``: the names that are completed where a model is expected."""
    nodes = list(_nodes(parser, (parser.prog,), "", tuple(models)))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](nodes)


def _nodes(
    parser: argparse.ArgumentParser, path: tuple[str, ...], help: str, models: tuple[str, ...]
) -> Iterator[CommandWords]:
    flags, words = [], []
    below: list[CommandWords] = []
    for action in actions_of(parser):
        commands = commands_of(action)
        if commands is not None:
            words += list(commands)
            for name, (explained, command) in commands.items():
                below += _nodes(command, (*path, name), explained, models)
        elif action.option_strings:
            explained, takes_value = help_of(parser, action), action.nargs != 0
            flags.append(FlagWords(tuple(action.option_strings), explained, takes_value, _words(action, models)))
        else:
            words += _words(action, models)
    yield CommandWords(path, help, tuple(flags), tuple(words))
    yield from below


def _words(action: argparse.Action, models: tuple[str, ...]) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    return models if action.dest == "model" and action.type is not Path else ()


# -- bash and zsh -----------------------------------------------------------------------------------------------------


def _cases(nodes: Sequence[CommandWords], *, assign: str) -> tuple[str, str]:
    """The commands of more than one word, as a pattern, and the lines that ``assign`` the words to choose from: a
    flag's values, or what may follow the command.
    """
    longer = "|".join(f'"{" ".join(node.path)}"' for node in nodes if len(node.path) > 1)
    values = []
    for node in nodes:
        names_of: dict[tuple[str, ...], list[str]] = {}
        for flag in node.flags:
            if flag.takes_value:
                names_of.setdefault(flag.words, []).extend(flag.names)
        for words, names in names_of.items():
            pattern = "|".join(f'"{" ".join(node.path)} {name}"' for name in names)
            values.append(f"        {pattern}) {assign.format(_quoted(words))}; is_value=1 ;;")
    follows = [
        f'        "{" ".join(node.path)}") if [[ $current == -* ]]; '
        f"then {assign.format(_quoted([name for flag in node.flags for name in flag.names]))}; "
        f"else {assign.format(_quoted(node.words))}; fi ;;"
        for node in nodes
    ]
    choose = [
        '    case "$at $previous" in',
        *values,
        "    esac",
        "    if [[ -z $is_value ]]; then",
        "        case $at in",
        *follows,
        "        esac",
        "    fi",
    ]
    return longer, "\n".join(choose)


def _quoted(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _bash(nodes: Sequence[CommandWords]) -> str:
    longer, choose = _cases(nodes, assign="words=({})")
    return f"""\
# Completion of phloem for bash: source <(phloem completion bash)
_phloem() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} at=phloem is_value= i
    local -a words=()
    if [[ $current == = ]]; then  # --flag=: bash takes the sign for a word of its own
        current=
    elif [[ $previous == = ]]; then
        previous=${{COMP_WORDS[COMP_CWORD - 2]}}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at ${{COMP_WORDS[i]}}" in
        {longer}) at+=" ${{COMP_WORDS[i]}}" ;;
        esac
    done
{choose}
    COMPREPLY=($(compgen -W "${{words[*]}}" -- "$current"))
}}
complete -o bashdefault -o default -F _phloem phloem
"""


def _zsh(nodes: Sequence[CommandWords]) -> str:
    longer, choose = _cases(nodes, assign="found=({})")
    return f"""\
#compdef phloem
# Completion of phloem for zsh: source <(phloem completion zsh), or as a file _phloem in a folder of $fpath
_phloem() {{
    local current=${{words[CURRENT]}} previous=${{words[CURRENT-1]}} at=phloem is_value= word
    local -a found
    for word in ${{words[2,CURRENT-1]}}; do
        case "$at $word" in
        {longer}) at="$at $word" ;;
        esac
    done
{choose}
    compadd -a found || _files
}}
if [[ $funcstack[1] == _phloem ]]; then
    _phloem "$@"
else
    compdef _phloem phloem
fi
"""


# -- fish -------------------------------------------------------------------------------------------------------------


def _fish(nodes: Sequence[CommandWords]) -> str:
    lines = ["# Completion of phloem for fish: phloem completion fish | source"]
    for node in nodes:
        *_, name = node.path
        if len(node.path) == 2:
            lines.append(f"complete -c phloem -n __fish_use_subcommand -f -a {name} -d {_in_fish(node.help)}")
        where = f"'__fish_seen_subcommand_from {name}'" if len(node.path) > 1 else "__fish_use_subcommand"
        if node.words and len(node.path) > 1:
            lines.append(f"complete -c phloem -n {where} -a {_in_fish(' '.join(node.words))}")
        for flag in node.flags:
            names = " ".join(f"-l {one[2:]}" if one.startswith("--") else f"-s {one[1:]}" for one in flag.names)
            value = f" -x -a {_in_fish(' '.join(flag.words))}" if flag.words else " -r" if flag.takes_value else ""
            lines.append(f"complete -c phloem -n {where} {names}{value} -d {_in_fish(flag.help)}")
    return "\n".join(lines) + "\n"


def _in_fish(text: str) -> str:
    """A text in fish's single quotes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
