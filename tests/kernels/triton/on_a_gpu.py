"""Lets tests that have their tensors on the CPU call compiled GPU kernels, see this folder's conftest."""

import copy
import importlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from phloem.kernels.groups import Groups

ENTRIES = {
    "attention": ("paged_attention", "partial_attention", "shared_prefix_attention"),
    "rope": ("rope_write_kv", "norm_rope_write_kv"),
    "norm": ("rms_norm",),
    "activation": ("silu_mul", "gelu_mul"),
    "edits": ("apply_bitmask", "apply_edits"),
    "sampling": ("sample",),
    "quantized": ("quantized_product",),
    "row": ("row_product",),
    "unpack": ("unpacked_product",),
    "dense": ("dense_product",),
    "experts": ("route_experts", "mix_experts"),
    "grouped": ("add_adapters", "group_rows"),
}


def move_kernels() -> None:
    """Replaces the entries of the kernels' modules, before the backend is made of them."""
    for module_name, names in ENTRIES.items():
        module = importlib.import_module(f"phloem.kernels.triton.{module_name}")
        for name in names:
            setattr(module, name, on_a_gpu(getattr(module, name)))


def on_a_gpu(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with tensors of the CPU, by copies on the GPU; tensors of a GPU are given as they are."""

    @wraps(call)
    def wrapped(*args: Any, **options: Any) -> Any:
        copies = Copies()
        found = call(*copies.there(args), **copies.there(options))
        copies.back()
        return copies.result(found) if copies.has_any else found

    return wrapped


class Copies:
    """Storages of the CPU and their copies on the GPU: tensors that share one there share one here."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def has_any(self) -> bool:
        return bool(self._storages)

    def there(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.is_cuda else self._tensor(value)
        if isinstance(value, Groups):
            return Groups(self.there(value.ids), value.num_groups)
        if isinstance(value, dict):
            return {key: self.there(each) for key, each in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(map(self.there, value))
        if is_dataclass(value) and not isinstance(value, type):
            moved = copy.copy(value)
            for field in fields(value):
                object.__setattr__(moved, field.name, self.there(getattr(value, field.name)))
            return moved
        return value

    def back(self) -> None:
        for here, there in self._storages.values():
            here.copy_(there)

    def result(self, value: Any) -> Any:
        """On the CPU; an argument that was returned is the caller's own tensor."""
        if isinstance(value, torch.Tensor):
            for given, there in self._given:
                if value is there:
                    return given
            for here, there in self._storages.values():
                if there.data_ptr() == value.untyped_storage().data_ptr() and there.numel():
                    bytes_ = here.untyped_storage()
                    return torch.empty(0, dtype=value.dtype).set_(
                        bytes_, value.storage_offset(), value.shape, value.stride()
                    )
            return value.cpu()
        if hasattr(value, "_fields"):
            return type(value)(*map(self.result, value))
        if isinstance(value, tuple | list):
            return type(value)(map(self.result, value))
        if is_dataclass(value) and not isinstance(value, type):
            return type(value)(**{field.name: self.result(getattr(value, field.name)) for field in fields(value)})
        return value

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._storages:
            here = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._storages[storage.data_ptr()] = here, here.cuda()
        there = self._storages[storage.data_ptr()][1].untyped_storage()
        copied = torch.empty(0, dtype=x.dtype, device="cuda").set_(there, x.storage_offset(), x.shape, x.stride())
        self._given.append((x, copied))
        return copied
