"""The options of each kind of grammar, with the values each can have."""

from .spec import GrammarError, GrammarSpec

# The first value of each is the default.
JSON_OPTIONS: dict[str, tuple[str, ...]] = {
    "property_order": ("schema", "any"),
    "whitespace": ("neat", "flexible", "compact"),
    "format": ("enforce", "annotate"),
    "numbers": ("canonical", "any"),
    "on_unsupported": ("refuse", "check_after"),
}
ANY_JSON = {"property_order": "any", "format": "annotate", "numbers": "any", "on_unsupported": "refuse"}
START_RULES = {"ebnf": "root", "lark": "start"}  # the defaults of the option ``start``


def option_values(spec: GrammarSpec) -> dict[str, str]:
    """The grammar's options with their defaults. Raises GrammarError for an option or a value that there is not."""
    choices: dict[str, tuple[str, ...]] = {}
    match spec.kind:
        case "json_schema" | "structural_tags":
            choices = JSON_OPTIONS
        case "json":
            choices = {"whitespace": JSON_OPTIONS["whitespace"]}
        case "ebnf" | "lark":
            choices = {"start": (START_RULES[spec.kind],)}
    for name, value in spec.options.items():
        if name not in choices:
            known = ", ".join(choices) or "none"
            raise GrammarError(f"unknown option {name!r}; a grammar of kind {spec.kind} takes {known}")
        if name != "start" and value not in choices[name]:
            raise GrammarError(f"option {name} is {value!r}; it can be {' or '.join(map(repr, choices[name]))}")
    values = {name: str(spec.options.get(name, known[0])) for name, known in choices.items()}
    return {**ANY_JSON, **values} if spec.kind == "json" else values
