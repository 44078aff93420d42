"""Latent attention and the choice of experts by groups: what the table of families does not show."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.protocol import ops
from phloem.protocol.errors import Unsupported
from phloem.protocol.sampling import SamplingParams
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.layers.routing import route_by_groups
from phloem.runtime.memory import KVBlocks, KVPool, slot_size_bytes
from phloem.runtime.models import load_model
from phloem.runtime.quant.group_tensor import GroupTensor, group_tensor
from phloem.runtime.weights.config_parts import Routing
from phloem.tests.runtime.engine.driver import Driver, Outcome
from phloem.tests.runtime.models.families import FAMILIES, LATENT, YARN, Family, make_family, make_family_gguf
from phloem.tests.runtime.models.hf_reference import hf_from_folder, hf_logits
from phloem.tests.runtime.models.lora import make_adapter
from phloem.tests.runtime.models.stepping import Stepper
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
FLOAT32 = EngineConfig(model="tiny", precision="float32")
IDS = np.random.default_rng(1).integers(0, 256, 41).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("latent") / "v3", FAMILIES["deepseek_v3"])


def changed(tmp_path: Path, name: str, **fields: Any) -> Path:
    family = FAMILIES[name]
    return make_family(tmp_path / "changed", Family(family.title, family.model_type, dict(family.config) | fields))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7}}),
        ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None, "rope_parameters": {"rope_theta": 500.0}}),
        ("deepseek_v3", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None, "q_lora_rank": 32}),
        ("deepseek_v2", {"kv_lora_rank": 22, "qk_nope_head_dim": 10, "v_head_dim": 7, "qk_rope_head_dim": 6}),
    ],
)
def test_each_field_of_the_config_has_its_effect(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    made = changed(tmp_path, name, **fields)
    want = hf_logits(hf_from_folder(made), IDS)
    got = Stepper(load_model(made, FLOAT32)).prefill(0, IDS, chunk=17)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_older_gguf_files_hold_both_products_of_a_latent_in_one_tensor(folder: Path, tmp_path: Path) -> None:
    family = FAMILIES["deepseek_v3"]
    metadata = {key: value for key, value in family.metadata.items() if not key.endswith("_mla")}
    metadata |= {"attention.key_length": 40, "attention.value_length": 16, "attention.head_count_kv": 4}
    old = Family(family.title, family.model_type, family.config, family.arch, metadata)
    path = make_family_gguf(tmp_path / "old.gguf", folder, old)
    want = hf_logits(hf_from_folder(folder), IDS)
    got = Stepper(load_model(path, FLOAT32)).prefill(0, IDS)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_a_slot_holds_the_latent_and_the_rotated_part_alone(folder: Path) -> None:
    model = load_model(folder, FLOAT32)
    numbers = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    assert slot_size_bytes(model.config, torch.float32) == 3 * numbers * 4  # of 3 layers
    pool = KVPool.for_model(model.config, num_slots=10, dtype=torch.float32)
    assert pool.size_bytes == 10 * slot_size_bytes(model.config, torch.float32)
    assert pool.v is pool.k


@pytest.mark.parametrize("format", ["auto", "int8"])
def test_blocks_of_latents_come_back_from_bytes(format: Any) -> None:
    pool = KVPool(3, 40, 1, 12, torch.float32, has_values=False)
    for layer in pool.k:
        layer.copy_(torch.randn(layer.shape))
    blocks = KVBlocks(pool, block_len=4, format=format)
    slots = np.arange(8, dtype=np.int32).reshape(2, 4)
    before = [layer[:8].clone() for layer in pool.k]
    kept = blocks.save(slots)
    assert len(kept[0]) == blocks.size_bytes == (3 * 4 * 12 * 4 if format == "auto" else 3 * 4 * (12 + 4))
    blocks.load(slots + 20, kept)
    for layer, want in zip(pool.k, before, strict=True):
        assert (layer[20:28] - want).abs().max() <= (0 if format == "auto" else 0.02) * want.abs().max()


def make_engine(folder: Path, **options: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=str(folder), precision="float32", num_threads=1, speculative="off", **options))


def test_forks_preemption_and_a_cold_tier_change_no_token(folder: Path) -> None:
    """Sequences and forks that together need more slots than the pool has give the tokens that they give alone."""
    long = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)

    def program(n: int) -> list[ops.AnyOp]:
        return [
            ops.Text(op=0, seq=0, text=f"{n} " + "the sap rises " * 5),
            ops.Fork(op=1, seq=0, children=(1, 2)),
            ops.Text(op=2, seq=1, text="and"),
            *(ops.Gen(op=3 + seq, seq=seq, params=long) for seq in (1, 2)),
        ]

    def tokens(outcome: Outcome) -> list[Any]:
        return [outcome.done[op].meta.candidates[0].token_ids for op in (4, 5)]

    engine = make_engine(folder, num_slots=4096, prefix_cache=False)
    driver = Driver(engine)
    alone = [tokens(driver.run(program(n))) for n in range(3)]
    engine.close()
    assert alone[0][0] != alone[0][1]
    engine = make_engine(folder, num_slots=300, host_cache_bytes=64 << 20)
    driver = Driver(engine)
    outcomes = [driver.submit(program(n)) for n in range(3)]
    driver.run()
    assert [tokens(outcome) for outcome in outcomes] == alone
    assert engine.scheduler.counters.num_preemptions > 0
    assert [tokens(driver.run(program(n))) for n in range(3)] == alone
    assert engine.tiers is not None and engine.tiers.counters.restored > 0
    engine.close()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is set: biases of deepseek_v3 are not served"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is served"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' of deepseek_v3 is not served"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' is not served; served are noaux_tc"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob true of deepseek_v2 is not served"),
        ("deepseek_v3", {"n_group": 5}, "12 experts cannot lie in 5 equal groups"),
        ("deepseek_v3", {"topk_group": 9}, "9 groups of experts a token; it must be between 1 and 4"),
        ("deepseek_v3", {"n_group": 12, "topk_group": 5}, "groups of one expert"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 4}, "4 experts a token of 1 groups of 3 experts"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "size of latent attention is 0; it must be at least 1"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "7 rotated dimensions; rope needs an even number"),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_name(
    name: str, fields: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"model_type": name}
    if name == "deepseek_v2":
        config |= {"norm_topk_prob": False, "topk_method": "greedy"}
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(Unsupported, match=message):
        load_model(tmp_path, EngineConfig(model="tiny", weights="random"))


def test_layers_that_predict_further_tokens_are_left_unread(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {"model.layers.3.eh_proj.weight": torch.zeros(4, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match=r"1 tensors that this architecture does not use: model.layers.3.eh_proj"):
        load_model(tmp_path, FLOAT32)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    got = Stepper(load_model(tmp_path, FLOAT32)).prefill(0, IDS[:9])
    assert torch.equal(got, Stepper(load_model(folder, FLOAT32)).prefill(0, IDS[:9]))


def test_experts_of_a_dense_layer_and_a_dense_block_of_a_mixture_are_strangers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for stranger in ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.up_proj.weight"):
        save_file(
            load_file(folder / "model.safetensors") | {stranger: torch.zeros(2, 2)}, tmp_path / "model.safetensors"
        )
        with pytest.raises(Unsupported, match=f"does not use: {stranger}"):
            load_model(tmp_path, FLOAT32)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_routing_is_that_of_a_loop_over_tokens(scoring: Any, has_bias: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(33, 12, generator=rng)
    bias = torch.randn(12, generator=rng) if has_bias else None
    routing = Routing(scoring=scoring, num_groups=4, groups_taken=2, scale=1.5, has_bias=has_bias)
    weights, ids = route_by_groups(logits, 3, routing=routing, normalise=True, bias=bias)
    for token, line in enumerate(logits.double()):
        scores = line.sigmoid() if scoring == "sigmoid" else line.softmax(0)
        ranked = [float(score) + (float(bias[i]) if bias is not None else 0.0) for i, score in enumerate(scores)]
        best = [sum(sorted(ranked[g : g + 3])[-(2 if scoring == "sigmoid" else 1) :]) for g in range(0, 12, 3)]
        groups = sorted(range(4), key=lambda g: -best[g])[:2]
        chosen = sorted((i for i in range(12) if i // 3 in groups), key=lambda i: -ranked[i])[:3]
        total = sum(float(scores[i]) for i in chosen)
        assert ids[token].tolist() == chosen
        assert weights[token].tolist() == pytest.approx([1.5 * float(scores[i]) / total for i in chosen], rel=1e-5)
    assert route_by_groups(logits[:0], 3, routing=routing, normalise=True, bias=bias)[1].shape == (0, 3)


def test_an_adapter_of_the_product_that_is_never_made_is_refused(folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", folder, seed=1, rank=2, targets=("kv_b_proj",))
    with pytest.raises(Unsupported, match="kv_b_proj.lora_A.weight changes what is not adapted here"):
        load_model(folder, EngineConfig(model="tiny", adapters={"poet": str(adapter)}))


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_packed_weights_are_reordered_as_those_of_floats(bits: int) -> None:
    rng = torch.Generator().manual_seed(4)
    q = torch.randint(0, 1 << bits, (8, 64), generator=rng, dtype=torch.uint8)
    packed = group_tensor(q, torch.rand(8, 2, generator=rng), bits=bits)
    order = torch.randperm(8, generator=rng)
    assert isinstance(packed, GroupTensor)
    assert torch.equal(packed.take_rows(order).dequantize(), packed.dequantize()[order])
