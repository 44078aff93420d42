"""JSON Schema as states of a machine. The rest of the package imports from here alone."""

from collections.abc import Callable

import numpy as np

from ..machine import Masks
from ..rests import Bounds, Needs
from .documents import Document
from .json_schema import Schemas
from .names import NameTrie
from .rests import Rests
from .scalars import Scalars

__all__ = ["Document", "JsonSchemas"]

REST_WORK = 20_000  # fuel


class JsonSchemas:
    """The schemas compiled on one machine. Schemas with equal options share their states.

    ``options`` are those of ``options.JSON_OPTIONS``, every one with a value. The methods take the machine's lock.
    """

    def __init__(self, masks: Masks) -> None:
        self._masks = masks
        machine = self._machine = masks.machine
        self._scalars = Scalars(machine)
        masks.prepare_text(self._scalars.free_text)
        masks.prepare_text(self._scalars.key_text)
        NameTrie(machine, 0, ("",)).filter(1, False)  # loads its compiled functions, for no mask to wait for them
        self.styles: dict[tuple[str, ...], Schemas] = {}

    @property
    def is_full(self) -> bool:
        """Whether a store of formulas is more than half full, so that new schemas should begin on another machine."""
        return any(schemas.formulas.is_half_full for schemas in self.styles.values())

    def start(
        self, text: str, options: dict[str, str], costs_of: Callable[[bytes], np.ndarray]
    ) -> tuple[int, list[str], Needs]:
        """The configuration before a text that is one value of the schema, what of the schema is not enforced, and what
        a text needs; ``costs_of``: see ``Rests``.

        Raises GrammarError.
        """
        schemas, root, unenforced = self._compile(text, options)
        with self._machine.lock:
            schemas.values.prepare_root(root)
            start = self._machine.start(*schemas.values.accept_root(root))
        return start, unenforced, self._needs(schemas, root, costs_of)

    def value(
        self, text: str, options: dict[str, str], costs_of: Callable[[bytes], np.ndarray]
    ) -> tuple[int, list[str], Needs]:
        """As ``start``, but the state before a value inside another text."""
        schemas, root, unenforced = self._compile(text, options)
        with self._machine.lock:
            root_layout = schemas.values.layouts.root
            state = schemas.values.value(root, layout=root_layout, space=root_layout.first)
        return state, unenforced, self._needs(schemas, root, costs_of)

    def _needs(self, schemas: Schemas, root: int, costs_of: Callable[[bytes], np.ndarray]) -> Needs:
        def bounds() -> Bounds:
            with self._machine.lock, self._machine.fuel.at_most(REST_WORK):
                return Rests(schemas.values, costs_of).bounds(root)

        return Needs(bounds)

    def _compile(self, text: str, options: dict[str, str]) -> tuple[Schemas, int, list[str]]:
        style = tuple(options[name] for name in ("property_order", "whitespace", "format", "numbers"))
        with self._machine.lock:
            schemas = self.styles.get(style)
            if schemas is None:
                schemas = self.styles[style] = Schemas(
                    self._machine,
                    self._scalars,
                    any_order=options["property_order"] == "any",
                    white_space=options["whitespace"],
                    canonical=options["numbers"] == "canonical",
                    enforce_formats=options["format"] == "enforce",
                )
        check_after = options["on_unsupported"] == "check_after"
        root, unenforced, hard_texts = schemas.compile(text, check_after=check_after)
        for code in hard_texts:
            with self._machine.lock:
                self._masks.prepare(code)
        return schemas, root, unenforced
