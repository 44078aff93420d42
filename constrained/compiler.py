"""Grammar text to a compiled grammar, with a cache by content."""

import json
import re
import threading
from collections import OrderedDict

from .ebnf import compile_ebnf
from .grammar import CompiledGrammar
from .json import JsonSchemas
from .lark_grammar import compile_lark
from .machine import Endings, Machine, Masks
from .options import option_values
from .regex_syntax import compile_regex
from .rests import Bounds, Needs, bounds_of, rest_of
from .spec import GRAMMAR_KINDS, GrammarError, GrammarKind, GrammarSpec, GrammarTooComplex
from .tags import Tags, read_tags
from .vocabulary import Vocabulary

MAX_TEXT_BYTES = 4 << 20
# Longer grammars get a machine of their own, so that their compilation holds no other grammar's lock.
PRIVATE_SCHEMA_BYTES = 256 << 10
PRIVATE_BYTES = 16 << 10  # of other kinds of grammar
# More properties than one are counted.
COUNTS_NAMES = re.compile(r'"minProperties"\s*:(?!\s*[01]\s*[,}])')
# Negated, ``maxProperties`` asks for many properties, and ``VALUE_CONDITIONS`` for one whose value is wrong.
CONDITIONS = re.compile(r'"(max|pattern)Properties"|"(additional|unevaluated)Properties"\s*:\s*\{')
VALUE_CONDITIONS = ("patternProperties", "additionalProperties", "unevaluatedProperties")
NEGATING = frozenset(("not", "oneOf", "if", "contains"))
# A reference to a meta-schema, or a meta-schema: these ask for unique items.
REFERS_TO_STANDARD = re.compile(r'"\$?(ref|id|dynamicRef|recursiveRef)"\s*:\s*"https?:\\?/\\?/json-schema\.org')


class Workshop:
    """One machine and the JSON schemas on it. ``reads_items``: see ``_reads_items``."""

    def __init__(self, vocabulary: Vocabulary, max_states: int, *, reads_items: bool) -> None:
        self.machine = Machine(vocabulary, max_states=max_states, compares_names=reads_items)
        self.masks = Masks(self.machine)
        self.endings = Endings(self.masks)
        self.schemas = JsonSchemas(self.masks)
        if reads_items:
            self.masks.prepare_items()

    @property
    def is_full(self) -> bool:
        """Whether new grammars should be compiled on another machine."""
        return self.machine.is_full or self.masks.is_full or self.schemas.is_full


class Compiler:
    """Compiles grammars for one vocabulary and keeps the last ``capacity`` of them. Thread-safe.

    The grammars share one machine. When it has grown past its limit, the compiler begins a fresh one for new grammars;
    matchers go on with the old one.
    """

    def __init__(self, vocabulary: Vocabulary, *, capacity: int = 512, max_states: int = 60_000) -> None:
        self.vocabulary = vocabulary
        self.capacity = capacity
        self.max_states = max_states
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, CompiledGrammar | GrammarError] = OrderedDict()
        # key: ``_reads_items``; both are made here, so that no grammar waits for a machine
        self._shops = {reads: self._new_shop(reads) for reads in (False, True)}

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The grammar, from the cache if it was compiled before. Raises ``GrammarError``, also from the cache."""
        found = self._found(spec)
        if isinstance(found, GrammarError):
            raise found.twin()
        return found

    def _found(self, spec: GrammarSpec) -> CompiledGrammar | GrammarError:
        key, reads_items = spec.key, _reads_items(spec)
        with self._lock:
            shop = self._shops[reads_items]
            if shop.is_full:
                self._cache.clear()
                shop = self._shops[reads_items] = self._new_shop(reads_items)
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                return found
        if len(spec.text) > (PRIVATE_SCHEMA_BYTES if spec.kind == "json_schema" else PRIVATE_BYTES):
            shop = self._new_shop(reads_items)
        try:
            found = self._compile(spec, shop)
        except GrammarError as error:
            found = error.twin()  # the caught error's traceback would keep the machine alive
        with self._lock:
            self._cache[key] = found
            while len(self._cache) > self.capacity:
                self._cache.popitem(last=False)
        return found

    def _new_shop(self, reads_items: bool) -> Workshop:
        return Workshop(self.vocabulary, self.max_states, reads_items=reads_items)

    def _compile(self, spec: GrammarSpec, shop: Workshop) -> CompiledGrammar:
        if spec.kind not in GRAMMAR_KINDS:
            raise GrammarError(f"unknown grammar kind {spec.kind!r}; there are {', '.join(GRAMMAR_KINDS)}")
        if len(spec.text) > MAX_TEXT_BYTES:
            raise GrammarTooComplex(f"the grammar has {len(spec.text):,} characters; the limit is {MAX_TEXT_BYTES:,}")
        machine, options = shop.machine, option_values(spec)
        unchecked: list[str] = []
        try:
            match spec.kind:
                case "json_schema" | "json":
                    text = spec.text if spec.kind == "json_schema" else "true"
                    start, unchecked, needs = shop.schemas.start(text, options, shop.endings.costs_of)
                case "structural_tags":
                    start, needs = self._tags(spec, shop, options, unchecked)
                case "regex":
                    start, needs = self._regex(spec, shop)
                case "choices":
                    start, needs = self._choices(spec, shop)
                case "ebnf":
                    with machine.lock:
                        parser = compile_ebnf(spec.text, shop.masks, start=options["start"])
                        start, needs = machine.start(parser.start, 0), parser.needs
                case _:
                    parser = compile_lark(spec.text, shop.masks, start=options["start"])
                    start, needs = machine.start(parser.start, 0), parser.needs
            shop.masks.only_token(start)  # so that the first mask is ready when it is asked for
        except RecursionError:
            raise GrammarTooComplex(f"the {spec.kind} grammar nests too deep") from None
        return CompiledGrammar(spec, machine, shop.masks, shop.endings, start, needs, tuple(unchecked))

    @staticmethod
    def _tags(spec: GrammarSpec, shop: Workshop, options: dict[str, str], unchecked: list[str]) -> tuple[int, Needs]:
        machine, ex = shop.machine, shop.machine.expressions
        costs_of = shop.endings.costs_of
        contents: list[Needs] = []  # of each tag

        def value_of(schema: str) -> int:
            state, unenforced, needs = shop.schemas.value(schema, options, costs_of)
            unchecked.extend(unenforced)
            contents.append(needs)
            return state

        def regex_of(pattern: str, where: str) -> int:
            expr = compile_regex(pattern, ex, anchored=True, where=where, is_whole=False)
            contents.append(Needs(lambda: bounds_of(rest_of(ex, expr))))
            return expr

        def bounds() -> Bounds:
            added = 0
            for tag, needs in zip(tags.tags, contents, strict=True):
                _, inside, content = needs.bounds
                around = costs_of(tag.begin.encode())[0] + costs_of(tag.end.encode())[0]
                added = max(added, inside, content + int(around))
            return Bounds(None, added, added)

        tags = read_tags(spec.text)
        with machine.lock:
            return machine.start(Tags(tags, machine, value_of, regex_of).start, 0), Needs(bounds)

    def _regex(self, spec: GrammarSpec, shop: Workshop) -> tuple[int, Needs]:
        with shop.machine.lock:
            return self._language(spec, shop, compile_regex(spec.text, shop.machine.expressions, anchored=True))

    def _choices(self, spec: GrammarSpec, shop: Workshop) -> tuple[int, Needs]:
        try:
            choices = json.loads(spec.text)
        except json.JSONDecodeError as error:
            raise GrammarError(f"choices are not JSON: {error}") from None
        if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
            raise GrammarError("choices must be a list of one or more strings, none empty")
        words = [c.encode(errors="surrogatepass") for c in choices]
        with shop.machine.lock:
            return self._language(spec, shop, shop.machine.expressions.one_of(words))

    @staticmethod
    def _language(spec: GrammarSpec, shop: Workshop, expr: int) -> tuple[int, Needs]:
        """The configuration before a text of ``expr``, and what such a text needs."""
        if not shop.machine.expressions.is_nonempty(expr):
            raise GrammarError(f"no text of this vocabulary's bytes matches the {spec.kind}")

        ex = shop.machine.expressions
        return shop.machine.start(shop.machine.text(expr), 0), Needs(lambda: bounds_of(rest_of(ex, expr)))


def _reads_items(spec: GrammarSpec) -> bool:
    """Whether the grammar may have to compare items of arrays, or names of objects: such grammars share a machine that
    keeps their texts."""
    if spec.kind not in ("json_schema", "structural_tags"):
        return False
    text = spec.text
    if '"uniqueItems"' in text or COUNTS_NAMES.search(text) or REFERS_TO_STANDARD.search(text):
        return True
    if CONDITIONS.search(text) is None:
        return False
    try:
        # ``unevaluatedProperties`` asks which branches of an ``anyOf`` do not hold.
        return _may_negate_conditions(json.loads(text), is_negated='"unevaluatedProperties"' in text)
    except (ValueError, RecursionError):
        return False  # as the compilation will tell


def _may_negate_conditions(value: object, *, is_negated: bool) -> bool:
    """Whether a schema may ask for more properties than ``maxProperties``, or for one whose value is wrong."""
    if isinstance(value, dict):
        if is_negated and not value.keys().isdisjoint(("maxProperties", "$ref")):
            return True
        if is_negated and any(isinstance(value.get(key), dict) and value[key] for key in VALUE_CONDITIONS):
            return True
        return any(
            _may_negate_conditions(inner, is_negated=is_negated or key in NEGATING) for key, inner in value.items()
        )
    return isinstance(value, list) and any(_may_negate_conditions(inner, is_negated=is_negated) for inner in value)


def compiler_of(vocabulary: Vocabulary) -> Compiler:
    """The vocabulary's own compiler, made on first use; it lives as long as the vocabulary."""
    with vocabulary.lock:
        if vocabulary.compiler is None:
            vocabulary.compiler = Compiler(vocabulary)
        assert isinstance(vocabulary.compiler, Compiler)
        return vocabulary.compiler


def compile(kind: GrammarKind, text: str, vocabulary: Vocabulary, **options: str | int | bool) -> CompiledGrammar:
    """Compile a grammar for a vocabulary; see ``GrammarSpec`` for the text of each kind.

    Options of ``json_schema``: ``property_order`` (schema, any), ``whitespace`` (neat, flexible, compact), ``format``
    (enforce, annotate), ``numbers`` (canonical: integers of at most 18 digits without point and exponent, others with
    at most 18 digits and 17 decimals, unless the schema names longer ones; any), ``on_unsupported`` (refuse,
    check_after); the first of each is the default. Raises ``GrammarError``.
    """
    if not isinstance(text, str):
        raise TypeError(f"the text of a grammar is a str, not {type(text).__name__}; json.dumps makes one of a schema")
    return compiler_of(vocabulary).compile(GrammarSpec(kind, text, options))
