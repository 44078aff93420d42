"""Decoders exported to ONNX: their logits are transformers', and graphs that are not read are refused by name."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phloem.protocol.errors import UnknownModel, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.models import load_model
from phloem.runtime.weights import open_weights
from phloem.runtime.weights.digest import weights_digest
from phloem.runtime.weights.part import Part
from phloem.tests.runtime.models.hf_reference import hf_from_folder, hf_logits
from phloem.tests.runtime.models.stepping import Stepper
from phloem.tests.runtime.weights.onnx_models import as_onnx, field, make_gpt2, make_llama, model, node, tensor
from phloem.tests.runtime.weights.test_damaged_files import check, damaged, weights_of

TOKENS = np.random.default_rng(0).integers(0, 64, 40).astype(np.int32)
MAKERS = {"optimum_llama": make_llama, "optimum_gpt2": make_gpt2, "torch_llama": make_llama}


def logits_of(folder: Path) -> torch.Tensor:
    return Stepper(load_model(folder, EngineConfig(model="tiny", precision="float32"))).prefill(0, TOKENS)


@pytest.mark.parametrize("export", MAKERS)
def test_logits_of_an_export_are_those_of_transformers(export: str, tmp_path: Path) -> None:
    source = MAKERS[export](tmp_path / "source")
    folder = as_onnx(source, tmp_path / "onnx", export)
    expected = hf_logits(hf_from_folder(source), TOKENS)
    assert (logits_of(folder) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("export", MAKERS)
def test_an_export_has_the_tensors_of_its_source(export: str, tmp_path: Path) -> None:
    source = MAKERS[export](tmp_path / "source")
    plain, exported = open_weights(source), open_weights(as_onnx(source, tmp_path / "onnx", export))
    assert set(exported.names()) == set(plain.names())
    for name in plain.names():
        assert exported.shape(name) == plain.shape(name)
        assert torch.equal(exported.tensor(name), plain.tensor(name)), name
    name = next(name for name in plain.names() if plain.shape(name)[0] > 15 and len(plain.shape(name)) == 2)
    part = Part(rows=(range(2, 5), range(8, 9)), columns=range(3, 11))
    assert torch.equal(exported.tensor(name, part), plain.tensor(name, part))


def test_safetensors_are_read_where_a_folder_has_both(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "both")
    (folder / "model.onnx").write_bytes(b"not read")
    assert type(open_weights(folder)).__name__ == "SafetensorsFolder"


def test_the_digest_changes_with_external_data(tmp_path: Path) -> None:
    folder = as_onnx(make_llama(tmp_path / "source"), tmp_path / "onnx", "torch_llama")
    before = weights_digest(folder)
    data = folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")
    assert weights_digest(folder) != before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose graph each test writes."""
    folder = make_llama(tmp_path_factory.mktemp("graphs") / "llama")
    (folder / "model.safetensors").unlink()
    return folder


def opened(folder: Path, nodes: list[bytes], tensors: list[bytes]) -> Any:
    (folder / "model.onnx").write_bytes(model(nodes, tensors))
    return open_weights(folder)


WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
MLP = "model.layers.0.mlp.up_proj.weight"
PRODUCT = node("MatMul", "/model/layers.0/mlp/up_proj/MatMul", ["x", "w"])


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([PRODUCT], WEIGHT.T),
        ([node("Gemm", "/model/layers.0/mlp/up_proj/Gemm", ["x", "w"])], WEIGHT.T),
        ([node("Transpose", "t", ["w"], "w2"), PRODUCT.replace(b"\x01w", b"\x02w2", 1)], None),
        ([node("Identity", "t", ["w"], "v"), PRODUCT.replace(b"\x01w", b"\x01v", 1)], WEIGHT.T),
    ],
)
def test_a_product_s_weight_is_found_through_its_node(nodes: list[bytes], expected: Any, folder: Path) -> None:
    if expected is None:
        nodes = [nodes[0], node("MatMul", "/model/layers.0/mlp/up_proj/MatMul", ["x", "w2"])]
        expected = WEIGHT
    weights = opened(folder, nodes, [tensor("w", WEIGHT)])
    assert weights.names() == [MLP]
    assert torch.equal(weights.tensor(MLP), torch.from_numpy(expected.copy()))


def test_float16_at_an_odd_offset_is_read(folder: Path) -> None:
    for pad in (0, 1):
        nodes = [PRODUCT, node("Relu", "r" * (8 + pad), ["x"])]
        weights = opened(folder, nodes, [tensor("w", WEIGHT.astype(np.float16))])
        assert torch.equal(weights.tensor(MLP), torch.from_numpy(WEIGHT.T.astype(np.float16)))


@pytest.mark.parametrize(
    ("nodes", "tensors", "message"),
    [
        ([node("MatMulNBits", "q", ["x"], domain="com.microsoft")], [], "node q is MatMulNBits, .* quantized graph"),
        ([node("DequantizeLinear", "d", ["x"])], [], "node d is DequantizeLinear, .* then use phloem quantize"),
        (
            [node("GroupQueryAttention", "g", ["x"], domain="com.microsoft")],
            [],
            "node g is GroupQueryAttention of com.microsoft, .* without optimisation",
        ),
        ([node("If", "i", ["x"])], [], "merged decoder is not read; give decoder_with_past_model.onnx"),
    ],
)
def test_graphs_that_are_not_read_are_refused_by_name(
    nodes: list[bytes], tensors: list[bytes], message: str, folder: Path
) -> None:
    with pytest.raises(Unsupported, match=message):
        opened(folder, nodes, [tensor("w", WEIGHT)])


def test_a_gemm_that_is_more_than_a_product_is_refused(folder: Path) -> None:
    alpha = field(5, field(1, "alpha") + b"\x15\x00\x00\x00\x40")
    with pytest.raises(Unsupported, match=r"Gemm with \{'alpha': 2.0\}, which is not read"):
        opened(folder, [node("Gemm", "/model/layers.0/mlp/up_proj/Gemm", ["x", "w"]) + alpha], [tensor("w", WEIGHT)])


def test_a_graph_whose_nodes_have_no_paths_is_refused_at_loading(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(model([node("MatMul", "MatMul_7", ["x", "w"])], [tensor("w", WEIGHT)]))
    with pytest.raises(UnknownModel, match=r"no tensor model.embed_tokens.weight, and no node .* Optimum"):
        load_model(folder, EngineConfig(model="tiny"))


@pytest.mark.parametrize(
    ("external", "message"),
    [
        ({"location": "../secret"}, r"lies in '../secret', which is no file of the folder"),
        ({"location": "/etc/passwd"}, r"lies in '/etc/passwd', which is no file of the folder"),
        ({"location": "absent"}, r"lies in 'absent', which is no file of the folder"),
        ({"location": "w.data", "offset": 4}, "needs 48 bytes of the 48 in w.data, not those at offset 4"),
        ({"location": "w.data", "offset": -48}, "not those at offset -48"),
        ({"location": "w.data", "length": 2**40}, "not those at length 1099511627776"),
    ],
)
def test_external_data_lie_within_a_file_of_the_folder(external: dict[str, Any], message: str, folder: Path) -> None:
    (folder / "w.data").write_bytes(WEIGHT.tobytes())
    with pytest.raises(UnknownModel, match=message):
        opened(folder, [PRODUCT], [tensor("w", WEIGHT, **external)])
    weights = opened(folder, [PRODUCT], [tensor("w", WEIGHT, location="w.data", offset=0, length=48)])
    assert torch.equal(weights.tensor(MLP), torch.from_numpy(WEIGHT.T.copy()))


def test_a_shape_without_its_bytes_is_refused(folder: Path) -> None:
    huge = field(1, 2**31) * 2 + field(2, 1) + field(8, "w") + field(9, b"1234")
    with pytest.raises(UnknownModel, match=r"tensor w has 4 bytes, but its shape .* needs 18,446,744,073,709,551,616"):
        opened(folder, [PRODUCT], [huge])


def test_several_graphs_need_one_name(folder: Path) -> None:
    (folder / "model.onnx").unlink(missing_ok=True)
    for name in ("decoder_model.onnx", "decoder_with_past_model.onnx"):
        (folder / name).write_bytes(model([PRODUCT], [tensor("w", WEIGHT)]))
    try:
        with pytest.raises(UnknownModel, match="must hold one, or one called model.onnx"):
            open_weights(folder)
    finally:
        for file in folder.glob("decoder*"):
            file.unlink()


def test_damaged_graphs_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = as_onnx(make_llama(tmp_path / "source"), tmp_path / "onnx", "torch_llama")
    file = folder / "model.onnx"
    data = file.read_bytes()

    def damage(rng: random.Random) -> Path:
        file.unlink()
        file.write_bytes(damaged(data, rng, len(data)))
        return folder

    check(damage, weights_of)
