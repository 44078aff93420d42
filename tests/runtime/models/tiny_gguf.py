"""Writes tiny GGUF files with ggml's own Python package."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np

_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}


@contextmanager
def write_gguf(path: Path, arch: str, metadata: Mapping[str, int | float | str]) -> Iterator[gguf.GGUFWriter]:
    """A writer for the tensors; the file is complete when the context ends. ``metadata``: keys of the architecture."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        writer.add_key_value(f"{arch}.{key}", value, _TYPES[type(value)])
    writer.add_vocab_size(259)
    writer.add_eos_token_id(258)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, kind: str) -> None:
    ggml_type = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(weight), ggml_type), raw_dtype=ggml_type)
