"""Tiny models that were exported to ONNX by ``make_onnx.py``, and ONNX files made by hand for what no exporter writes.

The exports lie in ``tests/data/onnx``; their weights follow from a seed, so the tests make the same models again.
"""

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from phloem.tests.runtime.models.tiny import make_tiny_model
from safetensors.torch import save_file

EXPORTS = Path(__file__).parents[2] / "data" / "onnx"
GPT2 = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}


def make_llama(folder: Path) -> Path:
    return make_tiny_model(
        folder,
        seed=0,
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    )


def make_gpt2(folder: Path) -> Path:
    """Its second norm is the first one again, which exporters store once."""
    folder = make_tiny_model(folder, seed=0)  # for its tokenizer
    rng, width = torch.Generator().manual_seed(0), GPT2["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {"wte": (GPT2["vocab_size"], width), "wpe": (GPT2["n_positions"], width)}
    for i in range(GPT2["n_layer"]):
        shapes |= {f"h.{i}.ln_1": (width,), f"h.{i}.attn.c_attn": (width, 3 * width)}
        shapes |= {f"h.{i}.attn.c_proj": (width, width), f"h.{i}.ln_2": (width,)}
        shapes |= {f"h.{i}.mlp.c_fc": (width, 4 * width), f"h.{i}.mlp.c_proj": (4 * width, width)}
    tensors = {}
    for name, shape in {**shapes, "ln_f": (width,)}.items():
        scale, mean = (0.2, 1.0) if len(shape) == 1 else (0.4, 0.0)
        tensors[f"transformer.{name}.weight"] = mean + scale * torch.randn(shape, generator=rng)
        if name not in ("wte", "wpe"):
            tensors[f"transformer.{name}.bias"] = 0.2 * torch.randn(shape[-1], generator=rng)
    for kind in ("weight", "bias"):
        tensors[f"transformer.h.1.ln_1.{kind}"] = tensors[f"transformer.h.0.ln_1.{kind}"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **GPT2, **ends}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_onnx(source: Path, folder: Path, export: str) -> Path:
    """``source`` with the graph ``export`` in the place of its safetensors."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in EXPORTS.glob(f"{export}.onnx*.gz"):
        (folder / file.stem.replace(export, "model")).write_bytes(gzip.decompress(file.read_bytes()))
    return folder


# Protocol Buffers by hand. A message is its fields' bytes.


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes((*out, number))


def field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def tensor(name: str, array: np.ndarray, **external: object) -> bytes:
    """A TensorProto; with ``location``, ``offset`` or ``length`` its numbers are in another file."""
    kinds = {"float32": 1, "float64": 11, "float16": 10, "int64": 7}
    out = b"".join(field(1, length) for length in array.shape)
    out += field(2, kinds[array.dtype.name]) + field(8, name)
    if not external:
        return out + field(9, array.tobytes())
    entries = (field(13, field(1, key) + field(2, str(value))) for key, value in external.items())
    return out + b"".join(entries) + field(14, 1)


def node(op: str, name: str, inputs: Sequence[str], output: str = "", *, domain: str = "", perm: bytes = b"") -> bytes:
    out = (
        b"".join(field(1, name) for name in inputs) + field(2, output or f"{name}_out") + field(3, name) + field(4, op)
    )
    attribute = field(5, field(1, "perm") + perm) if perm else b""
    return out + attribute + (field(7, domain) if domain else b"")


def model(nodes: Sequence[bytes], tensors: Sequence[bytes]) -> bytes:
    graph = b"".join(field(1, part) for part in nodes) + b"".join(field(5, part) for part in tensors)
    return field(1, 8) + field(7, graph)
