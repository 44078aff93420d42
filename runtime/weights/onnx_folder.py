"""The weights of a decoder that was exported to ONNX: config.json and a graph, whose arithmetic is not run.

A graph keeps the weights that no exporter changed under the names of their modules. Those that a product reads are
transposed and renamed (``onnx::MatMul_733``): the path of the node that reads them names their module
(``/model/layers.0/self_attn/q_proj/MatMul``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ...protocol.errors import UnknownModel, Unsupported
from .damage import shown
from .mapped import forget_pages, map_file
from .model_config import ModelConfig
from .onnx_graph import GraphNode, Initialiser, OnnxGraph, read_graph
from .part import Part, part_of
from .safetensors_file import read_folder_config

_FLOATS = {1: torch.float32, 10: torch.float16, 16: torch.bfloat16}
_QUANTIZED_OPS = ("DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "MatMulNBits")
_STANDARD = ("", "ai.onnx", "ai.onnx.ml")  # domains
_PRODUCTS = {"MatMul": "weight", "Gemm": "weight", "Gather": "weight", "Mul": "weight", "Add": "bias"}
_PREFIX = re.compile(r"(.*?)(?:model\.layers|transformer\.h|gpt_neox\.layers)\.0\.")
_ADVICE = "export it with Optimum in float32 or float16, without optimisation (optimum-cli export onnx)"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is, and what makes it the module's own."""

    stored: Initialiser
    is_transposed: bool = False
    is_folded: bool = False  # a norm's weight with its offset added


class OnnxFolder:
    """Tensors under their Hugging Face names, mapped from ``*.onnx`` and its external data."""

    format = "safetensors"  # whose names these are

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: ModelConfig = read_folder_config(path)
        if self.config.family == "idefics3":
            raise Unsupported(f"{path}: an image encoder in ONNX is not read; use the folder of safetensors")
        self._file = onnx_file_of(path)
        self._maps = {self._file.name: map_file(self._file)}
        graph = read_graph(self._file, self._maps[self._file.name])
        _refuse_foreign(self._file, graph)
        places = _places(graph, transposed=self.config.transposed)
        prefix = next((match[1] for name in places if (match := _PREFIX.match(name))), "")
        self._places = {name.removeprefix(prefix): place for name, place in places.items()}
        if self.config.tied_embeddings:
            self._places.pop("lm_head.weight", None)  # a transposed copy of the embedding
        self._spans = {name: self._span(place.stored) for name, place in self._places.items()}

    def names(self) -> list[str]:
        return list(self._places)

    def has_packed(self) -> bool:
        return False

    def release(self) -> None:
        for mapped in self._maps.values():
            forget_pages(mapped)

    def unpacked(self) -> str:
        return ""

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        return tuple(reversed(place.stored.shape)) if place.is_transposed else tuple(place.stored.shape)

    def tensor(self, name: str, part: Part | None = None) -> torch.Tensor:
        """A mapped tensor; a copy where the graph has it transposed. Raises UnknownModel for a name that it has not."""
        place, (file, offset) = self._place(name), self._spans[name]
        dtype, count = _FLOATS[place.stored.data_type], prod(place.stored.shape)
        if not count:
            found = torch.empty(place.stored.shape, dtype=dtype)
        elif offset % dtype.itemsize:  # torch reads aligned numbers
            raw = torch.frombuffer(self._maps[file], dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
            found = raw.clone().view(dtype).view(place.stored.shape)
        else:
            found = torch.frombuffer(self._maps[file], dtype=dtype, count=count, offset=offset)
            found = found.view(place.stored.shape)
        if place.is_transposed:
            found = found.T
        if place.is_folded:
            found = found - self.config.norm_offset
        wanted = found if part is None else part_of(found, part)
        assert isinstance(wanted, torch.Tensor)
        return wanted.contiguous()

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise UnknownModel(
                f"{self._file} has no tensor {name}, and no node whose path names its module; it is of another "
                f"architecture than its config.json says, or was changed after the export: {_ADVICE}"
            )
        return self._places[name]

    def _span(self, stored: Initialiser) -> tuple[str, int]:
        """The file of a tensor and its offset there, once its size is that of its shape."""
        name = shown(stored.name)
        size = prod(stored.shape) * _FLOATS[stored.data_type].itemsize
        if any(length < 0 for length in stored.shape):
            raise UnknownModel(f"{self._file}: tensor {name} has the shape {stored.shape}; export it again")
        if not stored.is_external:
            first, end = stored.data or (0, 0)
            if end - first != size:
                raise UnknownModel(
                    f"{self._file}: tensor {name} has {end - first:,} bytes, but its shape {stored.shape} "
                    f"needs {size:,}"
                )
            return self._file.name, first
        file = stored.external.get("location", "")
        if not file or Path(file).name != file or file in (".", "..") or not (self.path / file).is_file():
            raise UnknownModel(f"{self._file}: tensor {name} lies in {shown(file)!r}, which is no file of the folder")
        offset = _number(stored.external.get("offset", "0"))
        length = _number(stored.external.get("length", str(size)))
        in_file = (self.path / file).stat().st_size
        if offset is None or length != size or offset + size > in_file:
            where = ", ".join(
                f"{key} {shown(stored.external[key])}" for key in ("offset", "length") if key in stored.external
            )
            raise UnknownModel(
                f"{self._file}: tensor {name} needs {size:,} bytes of the {in_file:,} in {file}, not those at {where}; "
                "fetch both files again"
            )
        if size and file not in self._maps:
            self._maps[file] = map_file(self.path / file)
        return file, offset


def onnx_file_of(path: Path) -> Path:
    """The folder's graph. Raises UnknownModel where there are several."""
    found = sorted(path.glob("*.onnx"))
    if len(found) == 1 or path / "model.onnx" in found:
        return path / "model.onnx" if path / "model.onnx" in found else found[0]
    names = ", ".join(file.name for file in found) or "no *.onnx file"
    raise UnknownModel(f"{path} holds {names}; it must hold one, or one called model.onnx")


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _refuse_foreign(path: Path, graph: OnnxGraph) -> None:
    """Raises Unsupported for graphs whose weights are packed, fused, or in branches."""
    for node in graph.nodes:
        where = f"{path}: node {shown(node.name or node.op)} is {shown(node.op)}"
        if node.op in _QUANTIZED_OPS:
            raise Unsupported(
                f"{where}, an operator of a quantized graph, which is not read; {_ADVICE}, then use phloem quantize"
            )
        if node.domain not in _STANDARD:
            raise Unsupported(f"{where} of {shown(node.domain)}, not of ONNX's own operators; {_ADVICE}")
        if node.op == "If":
            raise Unsupported(f"{where}: a merged decoder is not read; give decoder_with_past_model.onnx, or {_ADVICE}")


def _places(graph: OnnxGraph, *, transposed: bool) -> dict[str, _Place]:
    """By the name of each weight: ``transposed`` if the family itself keeps a layer's matrices as [inputs, outputs]."""
    # A value is an initialiser, or one that was passed on: ONNX lists nodes in the order of their use.
    values = {name: _Place(stored) for name, stored in graph.initialisers.items() if stored.data_type in _FLOATS}
    places: dict[str, _Place] = {}
    in_products: set[str] = set()
    for node in graph.nodes:
        source = values.get(node.inputs[0]) if node.inputs else None
        if source is not None and node.outputs and node.op in ("Identity", "Transpose"):
            is_turned = node.op == "Transpose" and len(source.stored.shape) == 2
            if is_turned and node.attributes.get("perm", [1, 0]) == [1, 0]:
                values[node.outputs[0]] = _Place(source.stored, not source.is_transposed)
            elif node.op == "Identity":
                values[node.outputs[0]] = source
            continue
        module = node.module() if node.op in _PRODUCTS else ""
        if not module:
            continue
        for at, name in enumerate(node.inputs):
            value = values.get(name)
            if value is None or prod(value.stored.shape) < 2:
                continue
            found = _as_read(node, at, value, transposed)
            if found is not None and (node.op not in ("Mul", "Add") or not _is_own_name(name)):
                places[f"{module}.{'bias' if node.op == 'Gemm' and at == 2 else _PRODUCTS[node.op]}"] = found
                in_products.add(name)
    own = {name: value for name, value in values.items() if name not in in_products and _is_own_name(name)}
    return {name: value for name, value in own.items() if name not in places} | places


def _is_own_name(name: str) -> bool:
    """Whether an initialiser's name is that of a module's weight, such as ``model.norm.weight``."""
    return "." in name and not any(mark in name for mark in ("/", ":"))


def _as_read(node: GraphNode, at: int, value: _Place, transposed: bool) -> _Place | None:
    """The weight of the module that made ``node``, of its input ``at``; None for constants of other kinds."""
    num_dims = len(value.stored.shape)
    match node.op, at:
        case "Gather", 0:
            return value if num_dims == 2 else None
        case ("MatMul", 1) | ("Gemm", 1):
            if num_dims != 2:
                return None
            rest = {key: number for key, number in node.attributes.items() if key != "transB"}
            if node.op == "Gemm" and any(number != (key != "transA") for key, number in rest.items()):
                raise Unsupported(f"node {shown(node.name)} is a Gemm with {shown(str(rest))}, which is not read")
            is_in_out = not node.attributes.get("transB", 0)
            own_order = transposed and ".h." in node.module()
            return _Place(value.stored, value.is_transposed ^ is_in_out ^ own_order)
        case "Gemm", 2:
            return value if num_dims == 1 else None
        case (("Mul" | "Add"), _):
            is_norm = node.op == "Mul" and "norm" in node.module().rpartition(".")[2]
            if num_dims != 1 or (node.op == "Mul" and not is_norm):
                return None
            return _Place(value.stored, is_folded=is_norm)
    return None
