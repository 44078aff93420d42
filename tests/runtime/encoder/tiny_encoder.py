"""A tiny random encoder as transformers and sentence-transformers save one, and transformers' vectors of it.

Import it as ``phloem.tests.runtime.encoder.tiny_encoder``.
"""

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "sat", "on", "mat", "rain", "code", "tree", "##s", "##ing"]
VOCAB = [*SPECIAL, *WORDS, *string.ascii_lowercase, *("##" + c for c in string.ascii_lowercase), *"0123456789.,!?"]
TEXTS = ["The cat sat on the mat.", "rain", "", "Trees, trees and code! " * 3, "the cats, the rain", "sat on 42 mats"]


def make_encoder(
    folder: Path,
    family: str = "bert",
    *,
    pooling: str = "mean_tokens",
    normalised: bool = True,
    max_len: int | None = None,
    seed: int = 0,
    head: str = "Model",
    **extra: Any,
) -> Path:
    """``extra`` goes into the config. Its texts have at most 32 tokens, or ``max_len``. ``head``: the end of the
    name of transformers' class.
    """
    torch.manual_seed(seed)
    kinds = {"bert": "Bert", "distilbert": "DistilBert", "mpnet": "MPNet", "roberta": "Roberta"}
    kind = (kinds | {"modernbert": "ModernBert", "xlm-roberta": "XLMRoberta"})[family]
    sizes: dict[str, Any] = {
        "vocab_size": len(VOCAB),
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": {"bert": 32, "distilbert": 32, "modernbert": 32, "mpnet": 34}.get(family, 33),
        "pad_token_id": 0,
        "initializer_range": 0.3,  # so that texts differ
        "type_vocab_size": 2,
        **extra,
    }
    if family == "distilbert":
        sizes |= {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4}
        untaken = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "type_vocab_size")
        sizes = {name: size for name, size in sizes.items() if name not in untaken}
    if family in ("modernbert", "mpnet"):
        del sizes["type_vocab_size"]
    if family == "mpnet":
        sizes["pad_token_id"] = 1
    if family == "modernbert":  # layers with a window, one of them between two without
        sizes = {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3} | sizes
    model = getattr(transformers, kind + head)(getattr(transformers, kind + "Config")(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases, which would change nothing
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    vocab = {text: i for i, text in enumerate(VOCAB)}
    if family == "mpnet":  # whose padding token is number 1
        vocab |= {"[UNK]": 0, "[PAD]": 1}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.enable_padding(length=16)  # as the files of sentence-transformers have it; nothing is padded
    backend.enable_truncation(16)
    backend.save(str(folder / "tokenizer.json"))
    if head != "Model":
        write(folder / "tokenizer_config.json", {"model_max_length": max_len or 32})
        return folder
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalised else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(modules, paths, strict=False))
    ]
    write(folder / "modules.json", entries)
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    write(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 48} | {f"pooling_mode_{mode}": mode == pooling for mode in modes},
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": max_len or 32, "do_lower_case": False})
    return folder


def write(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


def change(file: Path, **fields: Any) -> None:
    write(file, json.loads(file.read_text()) | fields)


def reference(
    folder: Path, ids: Sequence[Sequence[int]], *, pooling: str = "mean_tokens", normalised: bool = True
) -> torch.Tensor:
    """transformers' vectors of token ids, one text after another."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    found = []
    for one in ids:
        with torch.inference_mode():
            last = model(input_ids=torch.tensor([one])).last_hidden_state[0]
        found.append({"mean_tokens": last.mean(0), "cls_token": last[0], "lasttoken": last[-1]}[pooling])
    stacked = torch.stack(found)
    return F.normalize(stacked, dim=1) if normalised else stacked
