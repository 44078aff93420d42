"""Grammar text to a compiled grammar, with a cache by content. Never fills a mask."""

import json
import threading
from collections import OrderedDict

from .ebnf import compile_ebnf
from .grammar import CompiledGrammar
from .json_schema import Schemas, option_values
from .lark_grammar import compile_lark
from .machine import Machine
from .regex_syntax import compile_regex
from .scalars import Scalars
from .spec import GRAMMAR_KINDS, GrammarError, GrammarSpec, GrammarTooComplex
from .tags import Tags, read_tags
from .values import Values
from .vocabulary import Vocabulary

JSON_OPTIONS = ("property_order", "whitespace", "format", "on_unsupported")
MAX_TEXT_BYTES = 4 << 20


class Compiler:
    """Compiles for one vocabulary. Thread-safe; holds the last ``capacity`` grammars, and one machine they share.

    A machine that has grown past its limit is left to the grammars made on it, and a fresh one begun.
    """

    def __init__(self, vocabulary: Vocabulary, *, capacity: int = 512, max_states: int = 60_000) -> None:
        self.vocabulary = vocabulary
        self.capacity = capacity
        self.max_states = max_states
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, CompiledGrammar | GrammarError] = OrderedDict()
        self._begin_machine()

    def _begin_machine(self) -> None:
        self.machine = Machine(self.vocabulary, max_states=self.max_states)
        self._scalars = Scalars(self.machine)
        self._schemas: dict[tuple[str, str, str], Schemas] = {}

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The grammar, from the cache if it was compiled before. Raises ``GrammarError``, also from the cache."""
        key = spec.key
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
        if found is None:
            try:
                found = self._compile(spec)
            except GrammarError as error:
                found = error
            with self._lock:
                self._cache[key] = found
                while len(self._cache) > self.capacity:
                    self._cache.popitem(last=False)
        if isinstance(found, GrammarError):
            raise found.with_traceback(None)
        return found

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.kind not in GRAMMAR_KINDS:
            raise GrammarError(f"unknown grammar kind {spec.kind!r}; there are {', '.join(GRAMMAR_KINDS)}")
        if len(spec.text) > MAX_TEXT_BYTES:
            raise GrammarTooComplex(f"the grammar has {len(spec.text):,} characters; the limit is {MAX_TEXT_BYTES:,}")
        with self._lock:
            if self.machine.num_states > self.max_states or len(self.machine.expressions.nodes) > 250_000:
                self._begin_machine()
            machine = self.machine
        try:
            with machine.lock:
                match spec.kind:
                    case "json_schema" | "json":
                        return self._json(spec, machine)
                    case "regex":
                        return self._regex(spec, machine)
                    case "choices":
                        return self._choices(spec, machine)
                    case "structural_tags":
                        return self._tags(spec, machine)
                    case "ebnf":
                        start = str(_one_option(spec, "start", "root"))
                        return CompiledGrammar(
                            spec, machine, machine.start(compile_ebnf(spec.text, machine, start=start), 0)
                        )
                    case "lark":
                        start = str(_one_option(spec, "start", "start"))
                        return CompiledGrammar(
                            spec, machine, machine.start(compile_lark(spec.text, machine, start=start), 0)
                        )
        except RecursionError:
            raise GrammarTooComplex(f"the {spec.kind} grammar nests too deep") from None
        raise AssertionError(spec.kind)

    def _json(self, spec: GrammarSpec, machine: Machine) -> CompiledGrammar:
        names = JSON_OPTIONS if spec.kind == "json_schema" else ("whitespace",)
        options = option_values(dict(spec.options), names)
        schemas = self._schemas_of(machine, options)
        root, unchecked = schemas.compile(
            spec.text if spec.kind == "json_schema" else "true",
            check_after=options.get("on_unsupported") == "check_after",
        )
        state, frame = schemas.values.accept_root(root)
        return CompiledGrammar(spec, machine, machine.start(state, frame), tuple(unchecked))

    def _schemas_of(self, machine: Machine, options: dict[str, str]) -> Schemas:
        order, formats = options.get("property_order", "any"), options.get("format", "annotate")
        style = (order, options["whitespace"], formats)
        found = self._schemas.get(style)
        if found is None:
            flexible = options["whitespace"] == "flexible"
            values = Values(machine, self._scalars, flexible=flexible, any_order=order == "any")
            found = self._schemas[style] = Schemas(values, enforce_formats=formats == "enforce")
        return found

    def _tags(self, spec: GrammarSpec, machine: Machine) -> CompiledGrammar:
        options = option_values(dict(spec.options), JSON_OPTIONS)
        schemas = self._schemas_of(machine, options)
        unchecked: list[str] = []

        def value_of(schema: str) -> int:
            root, left = schemas.compile(schema, check_after=options["on_unsupported"] == "check_after")
            unchecked.extend(left)
            return schemas.values.value(root)

        def regex_of(pattern: str, where: str) -> int:
            return compile_regex(pattern, machine.expressions, anchored=True, where=where)

        tags = Tags(read_tags(spec.text), machine, self._scalars, value_of, regex_of)
        return CompiledGrammar(spec, machine, machine.start(tags.start, 0), tuple(unchecked))

    def _regex(self, spec: GrammarSpec, machine: Machine) -> CompiledGrammar:
        option_values(dict(spec.options), ())
        expr = compile_regex(spec.text, machine.expressions, anchored=True)
        return self._language(spec, machine, expr)

    def _choices(self, spec: GrammarSpec, machine: Machine) -> CompiledGrammar:
        option_values(dict(spec.options), ())
        try:
            choices = json.loads(spec.text)
        except json.JSONDecodeError as error:
            raise GrammarError(f"choices are not JSON: {error}") from None
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise GrammarError("choices must be a list of one or more strings, none empty")
        return self._language(spec, machine, machine.expressions.one_of([c.encode() for c in choices]))

    def _language(self, spec: GrammarSpec, machine: Machine, expr: int) -> CompiledGrammar:
        if not machine.expressions.is_nonempty(expr):
            raise GrammarError(f"no text of this vocabulary's bytes matches the {spec.kind}")
        state = self._scalars.text(expr)
        return CompiledGrammar(spec, machine, machine.start(state, 0))


def _one_option(spec: GrammarSpec, name: str, default: str) -> str | int | bool:
    for key in spec.options:
        if key != name:
            raise GrammarError(f"unknown option {key!r}; there is {name}")
    return spec.options.get(name, default)


def compiler_of(vocabulary: Vocabulary) -> Compiler:
    """The vocabulary's own compiler, made at the first asking; it lives as long as the vocabulary does."""
    with vocabulary.lock:
        if vocabulary.compiler is None:
            vocabulary.compiler = Compiler(vocabulary)
        assert isinstance(vocabulary.compiler, Compiler)
        return vocabulary.compiler


def compile(kind: str, text: str, vocabulary: Vocabulary, **options: str | int | bool) -> CompiledGrammar:
    """Compile a grammar for a vocabulary; see ``GrammarSpec`` for the text of each kind.

    Options of ``json_schema``: ``property_order`` (schema, any), ``whitespace`` (flexible, compact), ``format``
    (enforce, annotate), ``on_unsupported`` (refuse, check_after). Raises ``GrammarError``.
    """
    return compiler_of(vocabulary).compile(GrammarSpec(kind, text, options))  # type: ignore[arg-type]
