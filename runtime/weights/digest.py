"""A name for a model's weights that changes when they do. Reads samples of big files, so it costs milliseconds."""

from hashlib import blake2b
from pathlib import Path

_CONFIGS = ("config.json", "adapter_config.json")
_WEIGHT_ENDINGS = (".gguf", ".safetensors")
_SAMPLES = 64
_SAMPLE_BYTES = 16 << 10


def weights_digest(path: Path) -> str:
    """A hash of a GGUF file, or of a folder's configs and weight files: sizes, both ends, and samples between.

    A model that was trained further differs nearly everywhere, so its digest changes. A change of a few bytes may not
    show.
    """
    digest = blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    endings = {file.suffix for file in files}
    is_onnx = ".onnx" in endings and ".safetensors" not in endings  # its data lie in files of any name
    for file in files:
        if file.name in _CONFIGS:
            digest.update(file.read_bytes())
        elif file.suffix in _WEIGHT_ENDINGS or is_onnx:
            size = file.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            last = max(size - _SAMPLE_BYTES, 0)
            with file.open("rb") as reader:
                for i in range(_SAMPLES):
                    reader.seek(last * i // (_SAMPLES - 1))
                    digest.update(reader.read(_SAMPLE_BYTES))
    return digest.hexdigest()
