"""What an argument parser was told. argparse shows it through private names only, which no other file reads."""

import argparse
from collections.abc import Iterator


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Flags, positional arguments and the choice of a command, in order."""
    return parser._actions


def groups_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """(title, its actions)."""
    return ((group.title or "", group._group_actions) for group in parser._action_groups)


def commands_of(action: argparse.Action) -> dict[str, tuple[str, argparse.ArgumentParser]] | None:
    """Each command's help and parser, if the action chooses a command."""
    if not isinstance(action, argparse._SubParsersAction):
        return None
    helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
    return {name: (helps.get(name, ""), command) for name, command in action.choices.items()}


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """In one line, with its default and choices filled in."""
    return " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""
