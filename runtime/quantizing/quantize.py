"""Quantizing a model: every matrix of its layers rounded to few bits and written with the rest of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ... import kernels
from ...protocol.errors import InvalidParams, Unsupported
from ..config import EngineConfig
from ..layers.linear import as_float
from ..models.names import TensorNames
from ..tokenizer import load_tokenizer
from ..weights import open_weights
from ..weights.damage import refuse_damage
from ..weights.gguf_header import read_header
from ..weights.model_config import ModelConfig
from ..weights.weight_file import WeightFile
from .awq import best_scales, refuse_config
from .layer_inputs import LayerInputs
from .quality import TextReader
from .rounding import Curvature, round_to_fours
from .stored_forms import SCHEMES, folder_form, format_of, gguf_form
from .writers import FolderWriter, GGUFFileWriter, TensorWriter, size_bytes_of

Say = Callable[[str, int, int], None]  # the activity, the parts done, the parts in total
MATRICES = ("q", "k", "v", "qkv", "output", "gate", "up", "gate_up", "down")
_EXPERTS = ("expert_gate", "expert_up", "expert_down", "shared_gate", "shared_up", "shared_down")
_TABLES = ("embedding", "head")
_MOST_CALIBRATION = 8192  # tokens


@dataclass(frozen=True, slots=True)
class Quantized:
    """``num_matrices`` are quantized, of which the source had ``num_copied`` in this form already; ``left`` names those
    of the layers that stayed floats.
    """

    path: Path
    size_bytes: int
    source_bytes: int
    num_matrices: int
    num_copied: int
    left: tuple[str, ...]
    was_packed: bool  # the source was itself quantized


@dataclass(slots=True)
class _Factors:
    """What one matrix or norm is multiplied with before it is rounded, and what rounding is to preserve."""

    columns: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    curvature: Curvature | None = None


def quantize_model(
    source: Path,
    out: Path,
    scheme: str,
    *,
    folder_format: str = "",
    calibration: str = "",
    say: Say = lambda what, done, total: None,
) -> Quantized:
    """Writes ``source`` (as ``open_weights`` takes it) to ``out``: a file if it ends in ``.gguf``, else a new folder.

    ``folder_format``: one of the scheme's formats of a folder, or its default. ``calibration``: a text for the schemes
    of 4 bits; ``int4-g32`` does without if it is empty. Raises InvalidParams or Unsupported, by name, before anything
    is written.
    """
    is_file = out.suffix == ".gguf"
    if scheme not in SCHEMES:
        raise InvalidParams(f"scheme {scheme!r} is not known; there are {', '.join(SCHEMES)}", where="scheme")
    if is_file and folder_format:
        raise InvalidParams(f"format {folder_format!r} is one of folders, and --out {out} is a file", where="format")
    try:
        chosen = format_of(scheme, folder_format)
    except ValueError as error:
        raise InvalidParams(str(error), where="format") from error
    if out.exists() and (is_file or not out.is_dir() or any(out.iterdir())):
        raise InvalidParams(f"--out {out} is already there; remove it or give another name", where="out")
    if not out.absolute().parent.is_dir():
        raise InvalidParams(f"--out {out}: there is no folder {out.absolute().parent}", where="out")
    form = gguf_form(scheme) if is_file else None
    if is_file and form is None:
        raise Unsupported(f"scheme {scheme}: GGUF has no such type; give --out DIR, or int8, int4-g32 or int4-awq")
    tokens = _calibration(source, scheme, calibration)
    with refuse_damage(source):
        file = open_weights(source)
        config = file.config
        names = TensorNames(config, file.format)
        names.refuse_strangers(file.names(), source=str(source))
        if config.transposed:
            raise Unsupported(f"{source}: {config.family} models are not quantized: their matrices are transposed")
        if config.latent is not None:
            raise Unsupported(f"{source}: {config.family} models, with latent attention, are not quantized")
        if config.family == "idefics3":
            raise Unsupported(f"{source}: vision models are not quantized: their image encoder would be lost")
        if config.num_experts and file.format == "gguf":
            raise Unsupported(f"{source}: mixtures of experts are quantized from a folder alone, not from a GGUF file")
        to_folder = None
        if form is None:
            widths = [config.hidden_size, config.intermediate_size]
            to_folder = folder_form(scheme, chosen, widths, _float_type(file, names))
        seen: _Calibration | None = None
        if scheme == "int4-awq":
            refuse_config(config)
            seen = _Calibration(source, file, tokens, 32 if to_folder is None else to_folder.group_len)
        elif tokens and not config.num_experts:
            kinds = (form.kind,) if form is not None else to_folder.copied_kinds if to_folder is not None else ()
            if file.format != "gguf" or not _has_kinds(source, names, kinds):
                seen = _Calibration(source, file, tokens, 0)
        writer: TensorWriter
        if form is not None:
            writer = GGUFFileWriter(out, file, form)
        else:
            assert to_folder is not None
            out.mkdir(exist_ok=True)
            writer = FolderWriter(out, file, to_folder)
        counts, left = _write(file, names, writer, seen, say)
        return Quantized(out, size_bytes_of(out), size_bytes_of(source), *counts, tuple(left), file.has_packed())


def _has_kinds(source: Path, names: TensorNames, kinds: Sequence[str]) -> bool:
    """Whether every matrix of a GGUF file has one of these types, so that none is rounded."""
    stored = read_header(source).tensors
    return all(stored[name].kind in kinds for key, *_, name in names.entries() if key in MATRICES and name in stored)


def _float_type(file: WeightFile, names: TensorNames) -> torch.dtype:
    """The type of the source's floats; float16 for those of 32 bits and for packed ones."""
    table = file.tensor(names.of_model("embedding"))
    return torch.bfloat16 if isinstance(table, torch.Tensor) and table.dtype == torch.bfloat16 else torch.float16


def _calibration(source: Path, scheme: str, text: str) -> list[int]:
    if scheme not in ("int4-g32", "int4-awq") or (not text and scheme == "int4-g32"):
        return []
    tokens = load_tokenizer(source).encode(text)[:_MOST_CALIBRATION]
    if len(tokens) < 64:
        raise InvalidParams(
            f"scheme {scheme} needs a calibration text of 64 tokens or more, and has {len(tokens)}", where="calibration"
        )
    return tokens


def _write(
    file: WeightFile, names: TensorNames, writer: TensorWriter, calibration: "_Calibration | None", say: Say
) -> tuple[tuple[int, int], list[str]]:
    """The numbers of quantized matrices, and of those that were copied; the names of those that stay floats."""
    written = TensorNames(file.config, writer.format)
    entries = list(zip(names.entries(), written.entries(), strict=True))
    num_matrices, num_copied, left = 0, 0, []
    for done, ((key, layer, _, name), (*_, new_name)) in enumerate(entries):
        say("tensors", done, len(entries))
        found = _Factors() if calibration is None or layer < 0 else calibration.factors(layer, key)
        stored = file.tensor(name)
        is_scaled = found.columns is not None or found.rows is not None
        if _is_rounded(key) and not is_scaled and writer.copy(new_name, stored, is_table=key in _TABLES):
            num_matrices += key not in _TABLES
            num_copied += key not in _TABLES
            continue
        tensor = as_float(stored)
        if key in _TABLES:
            writer.table(new_name, tensor)
        elif key in MATRICES or key in _EXPERTS:
            if found.columns is not None:
                tensor = tensor * found.columns
            if found.rows is not None:
                tensor = tensor * found.rows.unsqueeze(1)
            if writer.matrix(new_name, tensor, found.curvature):
                num_matrices += 1
            else:
                left.append(new_name)
        else:
            offset = file.config.norm_offset
            writer.plain(new_name, tensor if found.rows is None else (tensor + offset) * found.rows - offset)
    say("tensors", len(entries), len(entries))
    writer.close()
    return (num_matrices, num_copied), left


def _is_rounded(key: str) -> bool:
    return key in MATRICES or key in _EXPERTS or key in _TABLES


class _Calibration:
    """What a text shows of the layers' inputs, one layer after the other."""

    def __init__(self, source: Path, file: WeightFile, tokens: Sequence[int], awq_group_len: int) -> None:
        """``awq_group_len`` 0: no scales by activations."""
        self._file, self._config = file, file.config
        self._names = TensorNames(file.config, file.format)
        self._group_len = awq_group_len
        kernels.warm_up()
        reader = TextReader(source, EngineConfig(model=str(source), precision="float32"))
        self._inputs = LayerInputs(reader, torch.tensor(tokens))
        self._found: dict[str, _Factors] = {}
        self._layer = -1

    def factors(self, layer: int, key: str) -> _Factors:
        """``layer`` is that of the last call, or the next one."""
        assert layer in (self._layer, self._layer + 1), (layer, self._layer)
        if layer != self._layer:
            self._layer, self._found = layer, {}
            self._add(layer)
        return self._found.get(key, _Factors())

    def _add(self, layer: int) -> None:
        inputs = self._inputs.of_next_layer()
        for target, matrices, before in _products(self._config):
            seen = inputs[target]
            scales = torch.ones_like(seen.mean_size)
            if before and self._group_len and len(scales) % self._group_len == 0:
                weights = [as_float(self._file.tensor(self._names.of_layer(layer, key))) for key in matrices]
                scales = best_scales(weights, seen, self._rounded)
                self._found.setdefault(before, _Factors()).rows = 1 / scales
            curvature = Curvature.of(seen.scaled(scales))
            for key in matrices:
                part = self._found.setdefault(key, _Factors())
                part.curvature = curvature
                if self._group_len:
                    part.columns = scales

    def _rounded(self, weight: torch.Tensor) -> torch.Tensor:
        return round_to_fours(weight, group_len=self._group_len, scale_dtype=torch.float16).dequantize()


def _products(config: ModelConfig) -> list[tuple[str, tuple[str, ...], str]]:
    """(a product's inputs, its matrices, the tensor whose rows make these inputs, or "")."""
    qkv = ("qkv",) if config.fused_qkv else ("q", "k", "v")
    gate_up = ("gate_up",) if config.fused_gate_up else ("gate", "up") if config.gated else ("up",)
    is_alone = config.num_heads == config.num_kv_heads and not config.fused_qkv and not config.qkv_bias
    has_up = config.gated and not config.fused_gate_up and not config.mlp_bias
    return [
        ("qkv", qkv, "attention_norm"),
        ("output", ("output",), "v" if is_alone else ""),
        ("gate_up", gate_up, "mlp_norm"),
        ("down", ("down",), "up" if has_up else ""),
    ]
