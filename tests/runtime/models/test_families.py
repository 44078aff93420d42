"""Each family of ``families.FAMILIES``: its logits are those of transformers, float32, however steps are cut."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from phloem import kernels
from phloem.kernels import QuantizedWeight
from phloem.kernels.backend import triton_backend, using
from phloem.kernels.cpu.pool import has_pool
from phloem.kernels.quantized_weight import unpacked_experts
from phloem.protocol.errors import Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.executor.replays import Replays
from phloem.runtime.layers.batch import ForwardBatch
from phloem.runtime.layers.moe import MoE
from phloem.runtime.memory import KVPool
from phloem.runtime.models import Model, load_model
from phloem.runtime.quantizing import quantize_model
from phloem.runtime.scheduler.plan import PlanRow, StepPlan
from phloem.runtime.weights.model_config import GGUF_FAMILIES
from phloem.tests.gpu import choose_kernels
from phloem.tests.runtime.models.families import BY_HAND, FAMILIES, make_family, make_family_gguf, table
from phloem.tests.runtime.models.hf_reference import hf_from_folder, hf_logits
from phloem.tests.runtime.models.lora import make_adapter, merge
from phloem.tests.runtime.models.stepping import Stepper
from safetensors.torch import load_file, save_file

choose_kernels()
FLOAT32 = EngineConfig(model="tiny", precision="float32")
ADAPTED = {
    "phi3": ("qkv_proj", "gate_up_proj", "o_proj"),
    "deepseek_v2": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}
IDS = np.random.default_rng(0).integers(0, 259, 75).astype(np.int32)


def assert_equal_logits(ours: torch.Tensor, theirs: torch.Tensor, *, tolerance: float = 1e-4) -> None:
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("families")
    return {name: make_family(at / name, family) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    """transformers' logits of IDS."""
    return {name: hf_logits(hf_from_folder(folder), IDS) for name, folder in folders.items()}


def test_the_readme_has_the_table_of_the_families() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    assert table() in readme, "write what `python -m phloem.tests.runtime.models.families` prints into README.md"


@pytest.mark.parametrize("family", GGUF_FAMILIES.items())
def test_every_architecture_that_is_read_is_in_the_table(family: tuple[str, str]) -> None:
    arch, ours = family
    proven = {row.arch for row in FAMILIES.values()} | set(BY_HAND.values())
    assert arch in proven and ours in {*FAMILIES, *BY_HAND.values()}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, folders: dict[str, Path], wanted: dict[str, torch.Tensor]) -> None:
    model, want = load_model(folders[name], FLOAT32), wanted[name]
    assert_equal_logits(Stepper(model).prefill(0, IDS), want)
    assert_equal_logits(Stepper(model).prefill(0, IDS, chunk=16), want)
    stepper = Stepper(model)  # a shared prefix, then decodes and a chunk in one batch
    stepper.step([(0, IDS[:40], 0), (1, IDS[:20], 0)])
    stepper.fork(0, 2)
    stepper.step([(2, IDS[40:41], 1)])
    for at in range(40, 44):
        got = stepper.step([(0, IDS[at : at + 1], 1), (1, IDS[at - 20 : at - 17], 1), (2, IDS[at + 1 : at + 2], 1)])
        stepper.slots[1] = stepper.slots[1][: at - 19]
        assert_equal_logits(got, want[[at, at - 18, at + 1]])


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3", "smollm3", "gpt_neox", "qwen2_moe", "deepseek_v3"])
def test_the_gpu_s_kernels_give_the_same_logits(
    name: str, folders: dict[str, Path], wanted: dict[str, torch.Tensor]
) -> None:
    """Interpreted: windows, soft caps, partial rope, norms of heads, gelu and experts on the Triton kernels."""
    with using(triton_backend()):
        stepper = Stepper(load_model(folders[name], FLOAT32))
        got = torch.cat((stepper.step([(0, IDS[:9], 9)]), stepper.step([(0, IDS[9:10], 1)])))
    assert_equal_logits(got, wanted[name][:10])


@pytest.mark.parametrize("form", ["mlx int4", "compressed-tensors int8", "Q4_1", "Q8_0"])
def test_the_gpu_keeps_quantized_experts_packed(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """The same experts as on a CPU, where they are floats."""
    if form.startswith("Q"):
        path = make_family_gguf(tmp_path / "tiny.gguf", folders["qwen3_moe"], FAMILIES["qwen3_moe"], kind=form)
    else:
        name, _, bits = form.partition(" ")
        scheme = "int8" if bits == "int8" else "int4-g32"
        path = quantize_model(folders["qwen3_moe"], tmp_path / "out", scheme, folder_format=name).path
    floats = load_model(path, FLOAT32)
    with using(triton_backend()):
        model = load_model(path, EngineConfig(model="tiny", precision="auto"))
        for layer, plain in zip(model.layers, floats.layers, strict=True):
            assert isinstance(layer.mlp, MoE) and isinstance(plain.mlp, MoE)
            for packed, want in ((layer.mlp.gate_up, plain.mlp.gate_up), (layer.mlp.down, plain.mlp.down)):
                assert isinstance(packed, QuantizedWeight) and isinstance(want, torch.Tensor)
                assert packed.kind == ("int4" if "4" in form else "int8")
                torch.testing.assert_close(unpacked_experts(packed, want.shape[1]), want, atol=2e-3, rtol=2e-3)
        if form == "Q4_1":
            got, want = Stepper(model).prefill(0, IDS[:2]), Stepper(floats).prefill(0, IDS[:2])
            assert float((got - want).norm() / want.norm()) < 0.1  # of activations in bfloat16


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.arch])
def test_logits_of_a_gguf_file_are_those_of_transformers(
    name: str, folders: dict[str, Path], wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = make_family_gguf(tmp_path / "tiny.gguf", folders[name], FAMILIES[name])
    assert_equal_logits(Stepper(load_model(path, FLOAT32)).prefill(0, IDS), wanted[name])


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.adapts])
def test_an_adapter_gives_the_logits_of_merged_weights(
    name: str, folders: dict[str, Path], wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    base = folders[name]
    targets = ADAPTED.get(name, ("q_proj", "v_proj", "o_proj"))
    adapter = make_adapter(tmp_path / "adapter", base, seed=1, rank=3, targets=targets)
    want = hf_logits(hf_from_folder(merge(tmp_path / "merged", base, adapter)), IDS)
    model = load_model(base, EngineConfig(model="tiny", precision="float32", adapters={"poet": str(adapter)}))
    assert_equal_logits(prefill_with(model, [0, -1]), torch.stack((want[-1], wanted[name][-1])))
    assert (want[-1] - wanted[name][-1]).abs().max() > 0.05 * want.abs().max()


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.adapts])
def test_adapters_of_families_that_take_none_are_refused(
    name: str, folders: dict[str, Path], tiny_model_path: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_model_path, seed=1, rank=3)
    with pytest.raises(Unsupported, match=rf"layer 0 is not adapted here; of a {name} model nothing can be"):
        load_model(folders[name], EngineConfig(model="tiny", adapters={"poet": str(adapter)}))


def test_gpt_2_s_own_files_have_no_prefix_and_keep_masks(
    folders: dict[str, Path], wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors = load_file(folders["gpt2"] / "model.safetensors")
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    plain |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 256, 256) for layer in range(3)}
    save_file(plain, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["gpt2"] / "config.json").read_bytes())
    assert_equal_logits(Stepper(load_model(tmp_path, FLOAT32)).prefill(0, IDS), wanted["gpt2"])


@pytest.mark.parametrize("name", FAMILIES)
def test_random_weights_have_the_shapes_of_the_family(name: str, folders: dict[str, Path]) -> None:
    model = load_model(folders[name], EngineConfig(model="tiny", precision="float32", weights="random"))
    logits = Stepper(model).prefill(0, IDS[:5])
    assert logits.shape == (5, 259) and torch.isfinite(logits).all()


def test_long_rope_takes_its_short_factors_where_no_text_can_be_longer(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    short = EngineConfig(model="tiny", precision="float32", max_seq_len=64)  # as far as the factors of short texts go
    want = hf_logits(hf_from_folder(folders["phi3"]), IDS[:64])
    path = make_family_gguf(tmp_path / "tiny.gguf", folders["phi3"], FAMILIES["phi3"])
    for file in (folders["phi3"], path):
        assert_equal_logits(Stepper(load_model(file, short)).prefill(0, IDS[:64]), want)
        long = Stepper(load_model(file, FLOAT32)).prefill(0, IDS[:64])
        assert (long - want).abs().max() > 0.01 * want.abs().max()


def prefill_with(model: Model, adapters: list[int]) -> torch.Tensor:
    """The logits after IDS of rows that have these adapters."""
    kv = KVPool.for_model(model.config, num_slots=256, dtype=model.kv_dtype)
    table = np.zeros((len(adapters), 128), dtype=np.int32)
    slots = [np.arange(100 * row, 100 * row + len(IDS), dtype=np.int32) for row in range(len(adapters))]
    rows = [PlanRow(row, row, 0, IDS, slots[row], 0, 1, adapter=adapter) for row, adapter in enumerate(adapters)]
    batch = ForwardBatch.from_plan(StepPlan(0, tuple(rows)), table)
    ids = torch.tensor(adapters).repeat_interleave(len(IDS))
    return model.forward(batch.with_adapters(ids, 1), kv)


@pytest.fixture
def own_threads() -> Iterator[None]:
    kernels.set_kernel_threads(1)
    yield
    kernels.set_threads(0)


@pytest.mark.skipif(not has_pool(), reason="without a pool steps run on torch's threads, off the tape")
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.arch])
def test_decode_steps_give_the_same_logits_with_a_tape(
    name: str, folders: dict[str, Path], tmp_path: Path, own_threads: None
) -> None:
    """With 8-bit weights, whose products are compiled. Families that need torch between products have no tape."""
    path = make_family_gguf(tmp_path / "tiny.gguf", folders[name], FAMILIES[name], kind="Q8_0")
    model = load_model(path, EngineConfig(model="tiny", precision="int16"))
    stepper = Stepper(model)
    stepper.step([(0, IDS[:30], 0), (1, IDS[5:26], 0), (2, IDS[9:12], 0)])
    replays = Replays(model, stepper.kv)
    for at, num_rows in ((30, 1), (31, 3), (32, 1), (33, 3)):
        batch = stepper.batch([(row, IDS[at : at + 1], 1) for row in range(num_rows)])
        with torch.inference_mode():
            want = model.features(batch, stepper.kv).clone()
            got = replays.forward(batch)
        if FAMILIES[name].taped:
            assert got is not None and torch.equal(got, want)
        else:
            assert got is None
    assert replays.num_tapes == (2 if FAMILIES[name].taped else 0)
    assert replays.num_patterns == (1 if FAMILIES[name].taped else 0)
