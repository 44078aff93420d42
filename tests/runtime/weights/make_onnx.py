"""Writes the ONNX files in ``tests/data/onnx``: exports of a tiny Llama and a tiny GPT-2, compressed.

Run with optimum-onnx 0.1, transformers 4.57, torch 2.13, onnx 1.23 and onnxscript 0.7, which the tests do not need:
`python -m phloem.tests.runtime.weights.make_onnx`. The tests make the same models again,
since their weights follow from a seed.
"""

import gzip
import tempfile
from pathlib import Path

import onnx
import torch
import transformers
from optimum.exporters.onnx import main_export
from phloem.tests.runtime.weights.onnx_models import EXPORTS, make_gpt2, make_llama


class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.wrapped = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.wrapped(ids, use_cache=False).logits


def keep(graph: Path, name: str) -> None:
    (EXPORTS / f"{name}.gz").write_bytes(gzip.compress(graph.read_bytes(), 9, mtime=0))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, make in (("optimum_llama", make_llama), ("optimum_gpt2", make_gpt2)):
            source, out = make(Path(folder) / name), Path(folder) / f"{name}-onnx"
            main_export(str(source), output=out, task="text-generation-with-past", do_validation=False)
            keep(out / "model.onnx", f"{name}.onnx")
        source = make_llama(Path(folder) / "dynamo")
        model = Logits(transformers.AutoModelForCausalLM.from_pretrained(source).eval())
        ids = torch.arange(8)[None]
        exported = torch.onnx.export(model, (ids,), dynamo=True, dynamic_shapes=({1: "tokens"},))
        exported.save(source / "model.onnx", external_data=True)
        graph = onnx.load(source / "model.onnx", load_external_data=False)
        for node in graph.graph.node:  # traces of the exporter's Python: nine tenths of the file
            kept = [entry for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"]
            del node.metadata_props[:]
            node.metadata_props.extend(kept)
        onnx.save(graph, source / "model.onnx")
        keep(source / "model.onnx", "torch_llama.onnx")
        keep(source / "model.onnx.data", "torch_llama.onnx.data")


if __name__ == "__main__":
    main()
