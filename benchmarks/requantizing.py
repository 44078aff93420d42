"""What it costs to write a ``Q4_1`` model in groups with whole zero points, part by part: the perplexity of a text.

    python -m benchmarks.requantizing [--model smollm2] [--folder DIR]
    python -m benchmarks.requantizing --write-floats DIR [--dtype float32]

A ``Q4_1`` block is ``q * scale + minimum`` with a real minimum; compressed-tensors stores ``(q - zero) * scale`` with a
whole ``zero``. The rows change one thing each; products are in float32. ``--folder``: one of ``phloem quantize``.
``--write-floats`` only unpacks the file into a folder of floats, as a source for ``phloem quantize``.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from phloem import kernels
from phloem.kernels.linear import PackedLinear
from phloem.runtime.config import EngineConfig
from phloem.runtime.layers.linear import as_float
from phloem.runtime.models.names import TensorNames
from phloem.runtime.quant import GroupTensor, QuantTensor, repack_group32
from phloem.runtime.quantizing.folder_of_gguf import hf_config, write_tokenizer
from phloem.runtime.quantizing.quality import TextReader, score_text
from phloem.runtime.quantizing.rounding import round_to_fours
from phloem.runtime.quantizing.texts import DOCUMENT
from phloem.runtime.tokenizer import load_tokenizer
from phloem.runtime.weights import open_weights
from phloem.runtime.weights.resolve import resolve_model
from safetensors.torch import save_file

from . import print_header
from .quality import linears

Change = Callable[[GroupTensor], torch.Tensor]  # a stored matrix -> its weights, float32
_STACKED = {"qkv": ("q", "k", "v"), "output": ("output",), "gate_up": ("gate", "up"), "down": ("down",)}


def with_whole_zeros(matrix: GroupTensor) -> torch.Tensor:
    """The same numbers 0..15 and scales, with the nearest whole zero point that 4 bits hold."""
    q, scale, zero = matrix.parts32()
    whole = (8 - zero / torch.where(scale == 0, 1.0, scale)).round().clamp(0, 15)
    groups = q.float().view(*scale.shape, -1)
    return ((groups - whole.unsqueeze(-1)) * scale.unsqueeze(-1)).view(matrix.shape)


def with_short_scales(matrix: GroupTensor) -> torch.Tensor:
    """Scales and minima rounded to bfloat16, the type of a folder's scales."""
    assert matrix.zero is not None
    scale, zero = matrix.scale, matrix.zero
    minimum = (zero - 8 * scale).bfloat16().float()
    scale = scale.bfloat16().float()
    return GroupTensor(matrix.q, scale, minimum + 8 * scale).dequantize()


def rounded_again(matrix: GroupTensor) -> torch.Tensor:
    """Each group's best whole zero point and scale, and numbers that fit them."""
    return round_to_fours(matrix.dequantize(), group_len=32, scale_dtype=torch.bfloat16).dequantize()


CHANGES: dict[str, Change] = {
    "scales and minima in bfloat16": with_short_scales,
    "whole zero points, the same numbers": with_whole_zeros,
    "whole zero points, rounded again": rounded_again,
}


def changed(reader: TextReader, path: Path, change: Change) -> None:
    """Gives the reader's model, in float32, the layers' weights that ``change`` makes."""
    file = open_weights(path)
    names = TensorNames(file.config, file.format)
    for product, found in linears(reader.model).items():
        for layer, linear in enumerate(found if product in _STACKED else ()):
            stored = [file.tensor(names.of_layer(layer, key)) for key in _STACKED[product]]
            blocks = [matrix for matrix in stored if isinstance(matrix, QuantTensor) and matrix.kind == "Q4_1"]
            if len(blocks) < len(stored):
                raise SystemExit(f"--model {path}: its matrices have other types than Q4_1; give a file of Q4_1 alone")
            weights = torch.cat([change(GroupTensor(*repack_group32(matrix))) for matrix in blocks])
            linear.parts = (PackedLinear(weights, precision="float32", out_dtype=linear.parts[0].out_dtype),)


def write_floats(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """The GGUF file ``path`` as a folder of safetensors. Its weights are rounded once, to ``dtype``."""
    file = open_weights(path)
    folder.mkdir()
    stored, written = (TensorNames(file.config, form).entries() for form in (file.format, "safetensors"))
    tensors = {
        name: as_float(file.tensor(old)).to(dtype).contiguous().clone()
        for (*_, old), (*_, name) in zip(stored, written, strict=True)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(file.config, str(path)) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(path, folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write-floats", type=Path, metavar="DIR")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    if args.write_floats is not None:
        write_floats(path, args.write_floats, getattr(torch, args.dtype))
        return 0
    print_header()
    if open_weights(path).config.qkv_bias:
        raise SystemExit(f"--model {args.model}: its products have biases; give a model without, such as smollm2")
    kernels.warm_up()
    tokens = torch.tensor(load_tokenizer(path).encode(DOCUMENT))
    reference = 0.0

    def show(name: str, reader: TextReader) -> None:
        nonlocal reference
        perplexity = score_text(reader, tokens).perplexity
        reference = reference or perplexity
        print(f"{name:<40} {perplexity:>8.3f} {perplexity / reference - 1:>+8.2%}", flush=True)

    reader = TextReader(path, EngineConfig(model=str(path), precision="float32"))
    show("the file", reader)
    for name, change in CHANGES.items():
        changed(reader, path, change)
        show(name, reader)
    if args.folder is not None:
        show(str(args.folder), TextReader(args.folder, EngineConfig(model=str(args.folder), precision="float32")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
