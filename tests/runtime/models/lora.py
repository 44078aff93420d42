"""Random adapters as PEFT saves them, and models with an adapter merged into the weights."""

import json
from pathlib import Path
from typing import Any

import torch
from phloem.runtime.weights.adapter_folder import TARGETS
from safetensors.torch import load_file, save_file


def make_adapter(
    folder: Path, base: Path, *, seed: int, rank: int, targets: tuple[str, ...] = tuple(TARGETS), **config: Any
) -> Path:
    """An adapter for the model in ``base``, strong enough to change its tokens."""
    folder.mkdir(parents=True)
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in targets:
            rows, columns = weight.shape
            at = f"base_model.model.{stem}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, columns, generator=rng) / columns**0.5
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, rank, generator=rng) / rank**0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told | config))
    return folder


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """``base`` with the adapter in its weights, in float32."""
    folder.mkdir()
    for file in base.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    told = json.loads((adapter / "adapter_config.json").read_text())
    scale = told["lora_alpha"] / (told["r"] ** 0.5 if told.get("use_rslora") else told["r"])
    added = load_file(adapter / "adapter_model.safetensors")
    tensors = load_file(base / "model.safetensors")
    for name in tensors:
        at = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{at}.lora_A.weight" in added:
            tensors[name] = tensors[name] + scale * added[f"{at}.lora_B.weight"] @ added[f"{at}.lora_A.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
