"""Writes a model's tensors one after the other, into a folder of safetensors or into a GGUF file."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from ...protocol.errors import Unsupported
from ..quant import Weight
from ..weights.gguf_file import stored_row_order
from ..weights.json_file import read_json
from ..weights.mlx import stack_of
from ..weights.packed_parts import FLOATS
from ..weights.safetensors_file import INDEX
from ..weights.weight_file import WeightFile
from .folder_of_gguf import hf_config, write_tokenizer
from .rounding import Curvature, round_to_q8_0
from .stored_forms import FolderForm, GGUFForm

MOST_FILE_BYTES = 4 << 30  # of one safetensors file
_TABLE_KIND = "Q8_0"  # of a GGUF file's embedding and head
_KEPT = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")  # of a folder: tokenizer, settings, terms


class TensorWriter(Protocol):
    """``format``: whose names the tensors have. ``close`` completes what was written."""

    format: str

    def copy(self, name: str, stored: Weight, *, is_table: bool) -> bool:
        """Writes the source's tensor with the numbers that it has; False, and nothing is written, where it has another
        form.
        """
        ...

    def matrix(self, name: str, weight: torch.Tensor, curvature: Curvature | None) -> bool:
        """Writes [N, K] quantized; False where its rows are no whole groups and it was written as floats.

        With ``curvature`` the schemes of 4 bits make up for errors.
        """
        ...

    def table(self, name: str, weight: torch.Tensor) -> None:
        """An embedding or a head, which loses more by few bits than the layers do."""
        ...

    def plain(self, name: str, tensor: torch.Tensor) -> None: ...

    def close(self) -> None: ...


class FolderWriter:
    format = "safetensors"

    def __init__(self, folder: Path, source: WeightFile, form: FolderForm) -> None:
        self._folder, self._source, self._form = folder, source, form
        self._left: list[str] = []
        self._tables: list[str] = []
        self._experts: dict[str, list[torch.Tensor]] = {}  # of stacks that are not complete
        self._part: dict[str, torch.Tensor] = {}
        self._part_bytes = 0
        self._files: list[Path] = []
        self._homes: dict[str, int] = {}
        if source.format == "gguf":
            self._config: dict[str, Any] = hf_config(source.config, str(source.path))
            write_tokenizer(source.path, folder)
        else:
            self._config = read_json(source.path / "config.json")
            for pattern in _KEPT:
                for file in source.path.glob(pattern):
                    if file.is_file() and file.name != INDEX:
                        shutil.copyfile(file, folder / file.name)

    def copy(self, name: str, stored: Weight, *, is_table: bool) -> bool:
        found = self._form.copied(stored, is_table)
        if found is None or any(not tensor.isfinite().all() for tensor in found.values() if tensor.is_floating_point()):
            return False
        self._add_parts(name, found)
        if is_table:
            self._tables.append(name.removesuffix(".weight"))
        return True

    def matrix(self, name: str, weight: torch.Tensor, curvature: Curvature | None) -> bool:
        if weight.shape[1] % self._form.group_len or weight.shape[0] % self._form.row_multiple:
            self.plain(name, weight)
            return False
        self._add_parts(name, self._form.encode(weight, curvature))
        return True

    def table(self, name: str, weight: torch.Tensor) -> None:
        found = self._form.encode_table(weight)
        if found is None:
            self.plain(name, weight)
            return
        self._add_parts(name, found)
        self._tables.append(name.removesuffix(".weight"))

    def plain(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.ndim == 2:
            self._left.append(name.removesuffix(".weight"))
        self._add(name, tensor.to(self._form.dtype))

    def close(self) -> None:
        self._flush()
        count = len(self._files)
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        else:
            homes = {name: names[part] for name, part in self._homes.items()}
            size = sum(file.stat().st_size for file in self._files)
            index = {"metadata": {"total_size": size}, "weight_map": homes}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        for file, name in zip(self._files, names, strict=True):
            file.replace(self._folder / name)
        if self._source.config.tied_embeddings:
            self._left.append("lm_head")
        for old in ("quantization", "quantization_config", "compression_config", "dtype"):
            self._config.pop(old, None)
        dtype = str(self._form.dtype).removeprefix("torch.")
        config = self._config | {"torch_dtype": dtype} | self._form.config(self._left, self._tables)
        (self._folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    def _add_parts(self, name: str, parts: Mapping[str, torch.Tensor]) -> None:
        for ending, tensor in parts.items():
            self._add(f"{name.removesuffix('.weight')}.{ending}", tensor)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype in FLOATS and not tensor.isfinite().all():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise Unsupported(f"{self._source.path}: tensor {name} has numbers that {dtype} does not hold")
        stack = stack_of(name) if self._form.stacks_experts else None
        if stack is not None:
            experts = self._experts.setdefault(stack, [])
            experts.append(tensor)
            if len(experts) < self._source.config.num_experts:
                return
            name, tensor = stack, torch.stack(self._experts.pop(stack))
        size = tensor.numel() * tensor.element_size()
        if self._part and self._part_bytes + size > MOST_FILE_BYTES:
            self._flush()
        self._part[name] = tensor.contiguous().clone()
        self._part_bytes += size
        self._homes[name] = len(self._files)

    def _flush(self) -> None:
        path = self._folder / f"part-{len(self._files)}.tmp"
        save_file(self._part, path, metadata={"format": "pt"})
        self._files.append(path)
        self._part, self._part_bytes = {}, 0


class GGUFFileWriter:
    """Only from a GGUF file, whose metadata it copies."""

    format = "gguf"

    def __init__(self, path: Path, source: WeightFile, form: GGUFForm) -> None:
        if source.format != "gguf":
            raise Unsupported(
                f"{source.path}: a GGUF file is written from a GGUF file alone, whose tokenizer and metadata it keeps; "
                "give --out DIR, or convert the folder with llama.cpp first"
            )
        self._path, self._form, self._config = path, form, source.config
        self._partial = path.with_name(f".{path.name}.partial")
        reader = gguf.GGUFReader(source.path)
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        arch = reader.fields["general.architecture"].contents()
        self._writer = gguf.GGUFWriter(self._partial, arch)
        for field in reader.fields.values():
            if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
                continue
            inner = field.types[-1] if len(field.types) > 1 else None
            value = field.contents()
            if inner is None or value:
                self._writer.add_key_value(field.name, value, field.types[0], inner)
        self._writer.add_file_type(form.file_type)
        if "general.quantization_version" not in reader.fields:
            self._writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    def copy(self, name: str, stored: Weight, *, is_table: bool) -> bool:
        before = self._stored[name]  # in the file's own order of rows
        if before.tensor_type.name != (_TABLE_KIND if is_table else self._form.kind):
            return False
        self._writer.add_tensor(name, before.data, raw_dtype=before.tensor_type)
        return True

    def matrix(self, name: str, weight: torch.Tensor, curvature: Curvature | None) -> bool:
        if weight.shape[1] % 32:
            self.plain(name, weight)
            return False
        order = stored_row_order(self._config, name, len(weight))
        if order is not None:
            weight = weight[order.argsort()]
        self._add(name, self._form.encode(weight, curvature), self._form.kind)
        return True

    def table(self, name: str, weight: torch.Tensor) -> None:
        if weight.shape[1] % 32:
            self.plain(name, weight)
        else:
            self._add(name, round_to_q8_0(weight), _TABLE_KIND)

    def plain(self, name: str, tensor: torch.Tensor) -> None:
        order = stored_row_order(self._config, name, len(tensor))
        if order is not None:
            tensor = tensor[order.argsort()]
        self._writer.add_tensor(name, tensor.float().contiguous().numpy())

    def close(self) -> None:
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
        self._partial.replace(self._path)

    def _add(self, name: str, blocks: torch.Tensor, kind: str) -> None:
        self._writer.add_tensor(name, np.ascontiguousarray(blocks.numpy()), raw_dtype=gguf.GGMLQuantizationType[kind])


def size_bytes_of(path: Path) -> int:
    """Of a GGUF file, or of a folder's weights."""
    if path.is_file():
        return path.stat().st_size
    files = [*path.glob("*.safetensors")] or [*path.glob("*.onnx*")]
    return sum(file.stat().st_size for file in files)
