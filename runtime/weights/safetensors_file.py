"""The weights of a Hugging Face folder: config.json and its safetensors files. No code of the folder runs."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from ...protocol.errors import UnknownModel, Unsupported
from ..quant import GroupTensor
from .damage import shown
from .json_file import read_json
from .mlx import experts_of, is_stack
from .model_config import ModelConfig, config_from_hf, ids_of
from .part import Part
from .quantized_folder import QuantizedMatrices, scheme_of
from .vision_config import VISION_PREFIXES

INDEX = "model.safetensors.index.json"
_GPT2_PREFIX = "transformer."
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class SafetensorsFolder:
    """Tensors under their Hugging Face names. A quantized matrix is one tensor, whatever the files make of it."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_folder_config(path)
        self._has_vision = config.family == "idefics3"
        self._files = {shard: open_shard(path / shard) for shard in shards_of(path)}
        self._read: set[str] = set()  # shards, since ``release``
        self._homes = {name: shard for shard, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        if config.tied_embeddings and "lm_head.scales" in self._homes:  # quantized apart from the embedding
            config = msgspec.structs.replace(config, tied_embeddings=False)
        embedding = "model.text_model.embed_tokens.weight" if self._has_vision else "model.embed_tokens.weight"
        if config.tied_embeddings and "lm_head.weight" in self._homes and embedding in self._homes:
            del self._homes["lm_head.weight"]  # a copy of the embedding, saved by some tools
        # GPT-2's own files leave out the prefix that transformers writes.
        self._prefix = _GPT2_PREFIX if config.family == "gpt2" and "wte.weight" in self._homes else ""
        self._stacks = self._expert_stacks(config.num_experts)
        self.config: ModelConfig = config
        scheme = scheme_of(read_json(path / "config.json"), str(path / "config.json"))
        if scheme is not None and (config.transposed or self._has_vision):
            raise Unsupported(f"{path}: a quantized {config.family} model is not read; use the plain or a GGUF file")
        self._quantized = None if scheme is None else QuantizedMatrices(scheme, self._homes, str(path))

    def names(self) -> list[str]:
        """Of the decoder's tensors."""
        if self._quantized is not None:
            return [name for name in self._quantized.names(self._homes) if not self._is_empty_bias(name)]
        hidden = VISION_PREFIXES if self._has_vision else ()
        return [f"{self._prefix}{name}" for name in self._homes if not name.startswith(hidden)]

    def vision_names(self) -> list[str]:
        """Of an image encoder's tensors."""
        return [name for name in self._homes if self._has_vision and name.startswith(VISION_PREFIXES)]

    def tensor(self, name: str, part: Part | None = None) -> torch.Tensor | GroupTensor:
        """Raises UnknownModel for a name that is not in the folder, Unsupported for numbers that are no floats."""
        if self._quantized is not None and name in self._quantized:
            self._refuse_part(name, part, "quantized")
            return self._quantized.read(name, self._stored)
        if name in self._stacks:
            self._refuse_part(name, part, "stacked with others")
            found = self._stored(name)
        else:
            file, stored = self._place(name)
            self._read.add(self._homes[stored])
            found = file.get_tensor(stored) if part is None else _read_part(file.get_slice(stored), part)
        if found.dtype not in _FLOATS:
            raise Unsupported(f"{self.path}: tensor {name} is of {found.dtype}; read are float32, float16 and bfloat16")
        return found

    def has_packed(self) -> bool:
        """Whether any matrix is quantized."""
        return self._quantized is not None

    def release(self) -> None:
        # A file stays mapped, with all that was read, as long as it is open or a tensor lies in it.
        for shard in self._read:
            self._files[shard] = open_shard(self.path / shard)
        self._read.clear()

    def unpacked(self) -> str:
        return self._quantized.unpacked() if self._quantized is not None else ""

    def _stored(self, name: str) -> torch.Tensor:
        file = self._files[self._homes[name]]
        self._read.add(self._homes[name])
        if name in self._stacks:
            stack, expert = self._stacks[name]
            found: torch.Tensor = file.get_slice(stack)[expert]
            return found
        found = file.get_tensor(name)
        return found

    def _expert_stacks(self, num_experts: int) -> dict[str, tuple[str, int]]:
        """(stack, expert) of each expert's tensor that lies in a stack as mlx-lm writes them; homes get their names."""
        found: dict[str, tuple[str, int]] = {}
        for stack in [name for name in self._homes if is_stack(name)]:
            shard = self._homes[stack]
            shape = self._files[shard].get_slice(stack).get_shape()
            if len(shape) != 3 or shape[0] != num_experts or not all(shape):
                raise UnknownModel(
                    f"{self.path}: tensor {shown(stack)} is {list(shape)}, but its config asks for {num_experts:,} "
                    "experts"
                )
            del self._homes[stack]
            for expert, name in enumerate(experts_of(stack, num_experts)):
                found[name] = stack, expert
                self._homes[name] = shard
        return found

    def _is_empty_bias(self, name: str) -> bool:
        """Some GPTQ files have a bias of zeros for each matrix of a model without biases."""
        if self._quantized is None or not self._quantized.has_bias(name):
            return False
        return not self._stored(name).count_nonzero()

    def shape(self, name: str) -> tuple[int, ...]:
        if self._quantized is not None and name in self._quantized:
            self._refuse_part(name, Part(), "quantized")
        if name in self._stacks:
            return tuple(self._files[self._homes[name]].get_slice(self._stacks[name][0]).get_shape()[1:])
        file, stored = self._place(name)
        return tuple(file.get_slice(stored).get_shape())

    def _refuse_part(self, name: str, part: Part | None, form: str) -> None:
        if part is not None:
            raise Unsupported(
                f"{self.path}: tensor {name} is {form} in safetensors, which is not read in parts; with "
                f"tensor_parallel use a GGUF file or plain weights",
                where="tensor_parallel",
            )

    def _place(self, name: str) -> tuple[Any, str]:
        """The open file of a tensor, and its name there."""
        stored = name.removeprefix(self._prefix)
        if stored not in self._homes:
            raise UnknownModel(f"{self.path} has no tensor {name}; it is incomplete or of another architecture")
        return self._files[self._homes[stored]], stored


def _read_part(stored: Any, part: Part) -> torch.Tensor:
    """``stored``: a tensor that safetensors reads when it is indexed."""
    num_dims = len(stored.get_shape())
    columns = slice(None) if part.columns is None else slice(part.columns.start, part.columns.stop)
    runs = [slice(None)] if part.rows is None else [slice(run.start, run.stop) for run in part.rows]
    found = [stored[run] if num_dims == 1 else stored[run, columns] for run in runs]
    return found[0] if len(found) == 1 else torch.cat(found)


def read_folder_config(path: Path) -> ModelConfig:
    """From config.json, and generation_config.json where there is one."""
    config = config_from_hf(read_json(path / "config.json"), source=str(path / "config.json"))
    if (path / "generation_config.json").is_file():
        more = ids_of(read_json(path / "generation_config.json").get("eos_token_id"))
        config = msgspec.structs.replace(config, eos_ids=tuple(dict.fromkeys((*config.eos_ids, *more))))
    return config


def shards_of(path: Path) -> list[str]:
    """The names of the folder's safetensors files. Raises UnknownModel where there are none."""
    if not (path / INDEX).is_file():
        shards = sorted(file.name for file in path.glob("*.safetensors"))
        if not shards:
            others = [file.name for suffix in ("bin", "pt", "pth", "h5") for file in path.glob(f"*.{suffix}")]
            kept = f"; its {others[0]} is not read" if others else ""
            text = f"{path} has no *.safetensors file{kept}; other weight formats are not read, save it as such"
            raise UnknownModel(text)
        return shards
    homes = read_json(path / INDEX).get("weight_map")
    if not isinstance(homes, dict) or not homes:
        raise UnknownModel(f"{path / INDEX} has no weight_map")
    shards = sorted({str(shard) for shard in homes.values()})
    for shard in shards:
        if Path(shard).name != shard or not (path / shard).is_file():
            raise UnknownModel(f"{path / INDEX} names {shard}, which is not in the folder; fetch the model again")
    return shards


def open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UnknownModel(f"{path} cannot be read as safetensors: {error}; fetch it again") from error
