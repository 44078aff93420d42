"""Modules whose code runs when somebody first asks for one of their names, not when they are imported.

Python's ``importlib.util.LazyLoader`` runs a module as soon as the import system looks at it, which torch's circular
imports do at once.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any

# What torch's meta device computes shapes with: a quarter of the time of ``import torch``, and no engine asks for it.
_META = frozenset({"torch._meta_registrations"})
# Parts of ``import torch`` for training, export and profiling. Of torch 2.13: torch's modules import each other in
# circles, so that another version may need another order.
_OF_TRAINING = frozenset(
    f"torch.{name}"
    for name in (
        "distributions",
        "export",
        "fx.passes",
        "masked",
        "nn.intrinsic",
        "nn.qat",
        "nn.quantized",
        "optim",
        "profiler",
        "quantization",
        "utils.data",
    )
) | {"torchgen.model"}
# Modules that torch and numba import for functions that no engine calls; unittest.mock imports asyncio.
_OF_OTHERS = frozenset({"numba.experimental", "unittest.mock", "yaml"})


def late_names(torch_version: str) -> frozenset[str]:
    """The modules that an engine's process imports late."""
    late = _META | _OF_OTHERS
    return late | _OF_TRAINING if torch_version.startswith("2.13.") else late


class LateImport:
    """A finder for ``sys.meta_path``."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


class _LateLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def run_and_get(name: str) -> Any:
            if name.startswith("__"):  # the import system looks whether there is a __path__ and the like
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            del vars(module)["__getattr__"]
            self._loader.exec_module(module)
            return getattr(module, name)

        vars(module)["__getattr__"] = run_and_get  # PEP 562


def import_late() -> None:
    """From now on, in this process; a module that is imported already stays as it is."""
    sys.meta_path.insert(0, LateImport(late_names(version("torch"))))
