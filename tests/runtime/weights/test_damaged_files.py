"""Damaged and hostile model files are refused in one line: no other exception, no large allocation, no long loop.

``PHLOEM_DAMAGED_FILES`` sets their number for each kind of file, a fifth of it for each kind of quantized
folder; 10,000 take about ten minutes.
"""

import json
import os
import random
import re
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from phloem.protocol.errors import PhloemError
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import load_model
from phloem.runtime.quantizing import SCHEMES, quantize_model
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.runtime.weights import open_weights
from phloem.runtime.weights.gguf_header import read_header
from phloem.tests.runtime.models.tiny import make_tiny_gguf, make_tiny_model
from phloem.tests.runtime.tokenizer.vocabularies import write_byte_level, write_sentencepiece
from phloem.tests.runtime.weights.quantized import gptq, neighbours, quantized_folder, random_numbers

NUM_FILES = int(os.environ.get("PHLOEM_DAMAGED_FILES", "50"))
TEXT = "An orchard on the north slope was planted in the spring, when the valley road was still gravel. " * 3
MOST_BYTES = 64 << 20  # of Python's memory that reading a tiny file may take
NUMBERS = [0, 1, 2, 3, 7, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
JUNK: list[Any] = [None, -1, 0, 3, 10**9, 10**12, 2**64, 1e308, 0.5, "", "x", "\n", True, [], [1], {}, {"a": []}]

Load = Callable[[Path], object]


def weights_of(path: Path) -> None:
    weights = open_weights(path)
    for name in weights.names():
        weights.tensor(name)
    load_model(path, EngineConfig(model=str(path), precision="float32"))


def tokenizer_of(path: Path) -> None:
    tokenizer = load_tokenizer(path)
    load_chat_template(path, tokenizer)
    tokenizer.decode(tokenizer.encode("Some text: 12 ü"))


def check(damage: Callable[[random.Random], Path], load: Load, num_files: int = NUM_FILES) -> None:
    """Each damaged file loads, or is refused in one line; a tenth and more are refused."""
    num_refused = 0
    tracemalloc.start()
    try:
        for seed in range(num_files):
            path = damage(random.Random(seed))
            refusal, peak = outcome(load, path, seed)
            for _ in range(2):  # a first load may also import modules, and kernels be compiled meanwhile
                if peak >= MOST_BYTES:
                    refusal, peak = outcome(load, path, seed)
            assert peak < MOST_BYTES, f"damage of seed {seed}: {peak:,} bytes"
            if refusal is not None:
                num_refused += 1
                assert refusal and "\n" not in refusal and len(refusal) < 1000, (seed, refusal)
    finally:
        tracemalloc.stop()
    assert num_refused > num_files // 10


def outcome(load: Load, path: Path, seed: int) -> tuple[str | None, int]:
    """The message of the refusal, or None, and the bytes that loading took at most."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    refusal = None
    try:
        load(path)
    except PhloemError as error:
        refusal = str(error)
    except BaseException as error:
        raise AssertionError(f"damage of seed {seed}: {type(error).__name__}: {error}") from error
    return refusal, tracemalloc.get_traced_memory()[1] - before


def damaged(data: bytes, rng: random.Random, length: int) -> bytes:
    """``data`` with a change in its first ``length`` bytes, or cut short."""
    out, at = bytearray(data), rng.randrange(length)
    match rng.randrange(6):
        case 0 | 1:
            out[at] = rng.randrange(256)
        case 2:
            out[at] ^= 1 << rng.randrange(8)
        case 3:
            out[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        case 4:
            out[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
        case 5:
            del out[rng.randrange(len(out)) :]
    return bytes(out)


def replaced(value: Any, rng: random.Random) -> Any:
    """A JSON value with one of its parts replaced or left out; parts near the top are likelier."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.2:
        return rng.choice(JUNK)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], replaced(value[at], rng), *value[at + 1 :]]
    key = rng.choice(list(value))
    if rng.random() < 0.1:
        return {name: part for name, part in value.items() if name != key}
    return value | {key: replaced(value[key], rng)}


def test_a_gguf_file_s_weights(tmp_path: Path) -> None:
    source = make_tiny_gguf(tmp_path / "tiny.gguf", seed=0, kinds={"": "Q4_0", "v_proj": "F16"})
    data, target = source.read_bytes(), tmp_path / "damaged.gguf"
    header = min(place.start for place in read_header(source).tensors.values())

    def damage(rng: random.Random) -> Path:
        target.write_bytes(damaged(data, rng, header))
        return target

    check(damage, weights_of)


@pytest.mark.parametrize("write", [write_byte_level, write_sentencepiece])
def test_a_gguf_file_s_tokenizer(write: Callable[[Path], Path], tmp_path: Path) -> None:
    data, target = write(tmp_path / "vocabulary.gguf").read_bytes(), tmp_path / "damaged.gguf"

    def damage(rng: random.Random) -> Path:
        target.write_bytes(damaged(data, rng, len(data) if rng.random() < 0.5 else 600))
        return target

    check(damage, tokenizer_of)


@pytest.mark.parametrize(
    ("name", "load"),
    [("config.json", weights_of), ("tokenizer.json", tokenizer_of), ("tokenizer_config.json", tokenizer_of)],
)
def test_a_folder_s_json(name: str, load: Load, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", seed=0)
    value = json.loads((folder / name).read_text())

    def damage(rng: random.Random) -> Path:
        (folder / name).write_text(json.dumps(replaced(value, rng)))
        return folder

    check(damage, load)


def test_a_folder_s_safetensors(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", seed=0)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]

    def damage(rng: random.Random) -> Path:
        file.unlink()
        file.write_bytes(damaged(data, rng, header))
        return folder

    check(damage, weights_of)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1,000,000,000,000; it must be between 0 and 10,000"),
        ({"hidden_size": 2**40}, "hidden_size is 1,099,511,627,776; it must be between 0 and 2,147,483,647"),
        (
            {"max_position_embeddings": 2**31 - 1},
            "trained for 2,147,483,647 positions, as it says; set max_seq_len to 134,217,728",
        ),
        ({"vocab_size": 10**9}, r"tensor model.embed_tokens.weight is \[259, 64\], but its config asks for"),
        ({"num_attention_heads": 2**31 - 1}, "query heads cannot share 2 key/value heads"),
    ],
)
def test_sizes_are_checked_before_anything_is_made(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(PhloemError, match=message):
        weights_of(folder)


def test_experts_are_counted_before_their_tensors_are_named(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = make_tiny_model(tmp_path / "tiny", seed=0, family="qwen3_moe", **experts)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": 10**6}))
    with pytest.raises(PhloemError, match="2 layers of 1,000,000 experts; in all there may be 100,000"):
        weights_of(folder)


def test_a_token_id_far_beyond_the_others_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", seed=0)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"][0]["id"] = 10**9
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(PhloemError, match="token ids from 0 to 1,000,000,000 for"):
        load_tokenizer(folder)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", seed=0)
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(PhloemError, match=re.escape("other weight formats are not read, save it as such")):
        weights_of(folder)


def gptq_folder(folder: Path) -> Path:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    q, zero, scale = random_numbers(128, 64, 32, 4, symmetric=False)
    one, two = (gptq(q, zero, scale, bits=4, groups=neighbours(64, 32)) for _ in range(2))
    matrices = {"model.layers.0.mlp.up_proj": one, "model.layers.1.mlp.up_proj": two}
    return quantized_folder(make_tiny_model(folder, seed=0), config, matrices)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("scheme", ["gptq", *SCHEMES, "int4-g32 compressed-tensors", "mixture of mlx"])
def test_a_quantized_folder(scheme: str, name: str, tmp_path: Path) -> None:
    """GPTQ with ``desc_act``, and what ``phloem quantize`` writes: compressed-tensors, AWQ and MLX."""
    if scheme == "gptq":
        folder = gptq_folder(tmp_path / "tiny")
    elif scheme == "mixture of mlx":
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        folder = make_tiny_model(tmp_path / "plain", seed=0, family="qwen3_moe", **sizes)
        folder = quantize_model(folder, tmp_path / "tiny", "int4-g32").path
    else:
        folder = make_tiny_model(tmp_path / "plain", seed=0)
        scheme, _, form = scheme.partition(" ")
        calibration = TEXT if scheme == "int4-awq" else ""
        folder = quantize_model(folder, tmp_path / "tiny", scheme, folder_format=form, calibration=calibration).path
    file = folder / name
    data = file.read_bytes()

    def damage(rng: random.Random) -> Path:
        file.unlink()
        if name == "config.json":
            config = json.loads(data)
            settings = replaced(config.pop("quantization_config"), rng)
            field = "quantization" if config.pop("quantization", None) else "quantization_config"
            file.write_text(json.dumps(config | {field: settings}))
        else:
            file.write_bytes(damaged(data, rng, 8 + struct.unpack("<Q", data[:8])[0]))
        return folder

    check(damage, weights_of, max(20, NUM_FILES // 5))
