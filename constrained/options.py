"""The options of JSON grammars with what each can be. Never acts on one."""

from collections.abc import Iterable

from .spec import GrammarError

OPTIONS = {
    "property_order": ("schema", "any"),
    "whitespace": ("flexible", "compact"),
    "format": ("enforce", "annotate"),
    "numbers": ("canonical", "any"),
    "on_unsupported": ("refuse", "check_after"),
}


def option_values(options: dict[str, object], allowed: Iterable[str]) -> dict[str, str]:
    """The options of a grammar with their defaults (the first of each), or a refusal by name."""
    known = {name: OPTIONS[name] for name in allowed}
    for name, value in options.items():
        if name not in known:
            raise GrammarError(f"unknown option {name!r}; there are {', '.join(known)}")
        if value not in known[name]:
            raise GrammarError(f"option {name} is {value!r}; it can be {' or '.join(map(repr, known[name]))}")
    return {name: str(options.get(name, choices[0])) for name, choices in known.items()}
