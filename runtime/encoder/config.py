"""An encoder's config: sizes, pooling, and the length of the texts it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from ...protocol.errors import InvalidParams, UnknownModel, Unsupported
from ..weights.damage import refuse_damage, shown
from ..weights.json_file import read_json, read_value

Pooling = Literal["mean", "cls", "last"]
Activation = Literal["gelu", "gelu_tanh", "relu", "tanh"]
Scores = Literal["sigmoid", "softmax", "logits"]

FAMILIES = ("bert", "distilbert", "modernbert", "mpnet", "roberta", "xlm-roberta")
CLASSIFIERS = {
    "bert": "BertForSequenceClassification",
    "distilbert": "DistilBertForSequenceClassification",
    "modernbert": "ModernBertForSequenceClassification",
    "mpnet": "MPNetForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
}
MAX_LAYERS = 1_000
MAX_LABELS = 100_000
_UNTYPED = ("distilbert", "modernbert", "mpnet")  # their tokens have no types
_MPNET_PADDING, _BUCKETS = 1, 32
# Families' own names of fields.
_RENAMED = {
    "distilbert": {
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "hidden_act": "activation",
    },
    "modernbert": {"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
}
_DEFAULT_EPS = {"modernbert": 1e-5}
_THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}  # ModernBERT's, where its config has none
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
# What sentence-transformers makes of a cross-encoder's logits, by the last part of the function's name.
_SCORES: dict[str, Scores] = {"Sigmoid": "sigmoid", "Identity": "logits"}
_MODULES = ("Transformer", "Pooling", "Normalize")


class EncoderConfig(msgspec.Struct, frozen=True):
    """One bidirectional transformer, and the pooling of its last layer. Its positions are learned or rotary.

    ``max_len``: the longest text in tokens, special tokens included. ``first_position``: the row of the position table
    that a text's first token takes. ``prompt`` comes before every text. With ``num_buckets`` attention adds a bias that
    depends on the distance of two tokens, in as many classes.

    With ``labels`` the model is a classifier: it gives a text, or a pair of texts, one score for each label, and
    ``scores`` says what becomes of its logits. Those of one label are rerankers.

    ``layer_windows``: of a model with rotary positions, how many tokens before and after it each layer's token attends
    to; 0: the whole text. ``local_theta`` is the base of rope in layers with a window, ``global_theta`` in the others.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    num_positions: int
    num_types: int
    norm_eps: float
    activation: Activation
    max_len: int
    first_position: int = 0
    num_buckets: int = 0
    pooling: Pooling = "mean"
    is_normalised: bool = False
    is_lowered: bool = False  # texts are made lower case before they are tokenized
    prompt: str = ""
    labels: tuple[str, ...] = ()
    scores: Scores = "logits"
    layer_windows: tuple[int, ...] = ()
    global_theta: float = 0.0
    local_theta: float = 0.0
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    classifier_bias: bool = True
    classifier_activation: Activation = "tanh"

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "vocab_size", "num_types"):
            if getattr(self, field) < 1:
                raise Unsupported(f"encoder config: {field} is {getattr(self, field)}; it must be at least 1")
        if self.num_layers > MAX_LAYERS:
            raise Unsupported(f"encoder config: {self.num_layers:,} layers; there may be {MAX_LAYERS:,}")
        if self.hidden_size % self.num_heads:
            raise Unsupported(f"encoder config: {self.num_heads} heads cannot share {self.hidden_size} dimensions")
        most = self.num_positions - self.first_position
        if not 1 <= self.max_len <= most:
            raise Unsupported(f"encoder config: texts of {self.max_len:,} tokens, but there are {most:,} positions")
        if self.is_rotary and (dim := self.hidden_size // self.num_heads) % 2:
            raise Unsupported(f"encoder config: heads have {dim} dimensions; rope needs an even number")

    @property
    def is_rotary(self) -> bool:
        return bool(self.layer_windows)


def is_encoder(path: Path) -> bool:
    """Whether ``path`` is the folder of a model of a family of encoders, one that cannot be served included."""
    file = path / "config.json"
    return file.is_file() and read_json(file).get("model_type") in FAMILIES


def read_encoder_config(path: Path, *, max_len: int = 0) -> EncoderConfig:
    """From the files that transformers and sentence-transformers write; ``max_len`` may shorten its texts.

    A folder without modules.json has mean pooling and no normalisation, as sentence-transformers takes it. Raises
    Unsupported for what would change the result and is not served.
    """
    with refuse_damage(path):
        config = _read(path)
    if not 0 <= max_len <= config.max_len:
        text = f"max_seq_len {max_len:,}, but {path} takes texts of 1 to {config.max_len:,} tokens; 0 is that limit"
        raise InvalidParams(text, where="max_seq_len")
    return msgspec.structs.replace(config, max_len=max_len or config.max_len)


def _read(path: Path) -> EncoderConfig:
    file = path / "config.json"
    config = read_json(file)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise Unsupported(f"{file}: model_type {family!r} is no encoder that is served; served: {', '.join(FAMILIES)}")
    heads = [name for name in config.get("architectures") or [] if not str(name).endswith(("Model", "ForMaskedLM"))]
    if heads and heads != [CLASSIFIERS[family]]:
        text = f"{file}: a {shown(str(heads[0]))} has an output layer of its own; served are embeddings and"
        raise Unsupported(f"{text} {CLASSIFIERS[family]}")
    renamed = _RENAMED.get(family, {})
    config = config | {ours: config[theirs] for ours, theirs in renamed.items() if theirs in config}
    if family == "distilbert":
        config["layer_norm_eps"] = 1e-12
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise Unsupported(f"{file}: position_embedding_type {shown(repr(kind))}; served is 'absolute'")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise Unsupported(f"{file}: the model is a decoder of an encoder's family; served are encoders")
    sizes = {
        ours: _count(file, config, theirs)
        for ours, theirs in {
            "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size",
            "intermediate_size": "intermediate_size",
            "num_heads": "num_attention_heads",
            "vocab_size": "vocab_size",
            "num_positions": "max_position_embeddings",
        }.items()
    }
    # RoBERTa's positions begin after the padding token's id.
    padding = _MPNET_PADDING if family == "mpnet" else _count(file, config, "pad_token_id", 1)
    first = 0 if family in ("bert", "distilbert", "modernbert") else padding + 1
    labels = _labels(file, config) if heads else ()
    num_buckets = _count(file, config, "relative_attention_num_buckets", _BUCKETS) if family == "mpnet" else 0
    if num_buckets not in (0, _BUCKETS):
        text = f"{file}: relative_attention_num_buckets is {num_buckets:,}; only {_BUCKETS} is served"
        raise Unsupported(f"{text}, as transformers takes no other")
    modules = {} if labels else _modules(path)
    pooling, includes_prompt = ("cls", True) if labels else _pooling(path, modules.get("Pooling"))
    prompt = "" if labels else _prompt(path)
    if prompt and not includes_prompt:
        raise Unsupported(f"{path}: a prompt that pooling leaves out (include_prompt false) is not served")
    max_len, is_lowered = _text_rules(path, modules.get("Transformer", ""), sizes["num_positions"] - first)
    common: dict[str, Any] = sizes | {
        "family": family,
        "num_types": 1 if family in _UNTYPED else _count(file, config, "type_vocab_size", 2),
        "num_buckets": num_buckets,
        "norm_eps": float(config.get("layer_norm_eps", _DEFAULT_EPS.get(family, 1e-12))),
        "activation": _activation(file, config, "hidden_act"),
        "first_position": first,
        "max_len": max_len,
        "pooling": pooling,
        "is_normalised": "Normalize" in modules,
        "is_lowered": is_lowered,
        "prompt": prompt,
        "labels": labels,
        "scores": _scores(file, config, len(labels)) if labels else "logits",
    }
    if family == "modernbert":
        common |= _modernbert(file, config, sizes["num_layers"], has_labels=bool(labels))
    return EncoderConfig(**common)


def _activation(file: Path, config: dict[str, Any], key: str) -> Activation:
    name = config.get(key, "gelu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise Unsupported(f"{file}: {key} {shown(repr(name))} is not served; served: {known}")
    return _ACTIVATIONS[name]


def _modernbert(file: Path, config: dict[str, Any], num_layers: int, *, has_labels: bool) -> dict[str, Any]:
    """The fields that only ModernBERT's config has."""
    every = max(1, _count(file, config, "global_attn_every_n_layers", 3))
    usual = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
    kinds = config.get("layer_types") or usual
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in _THETAS for kind in kinds):
        text = f"{file}: layer_types is {shown(repr(kinds))}; it must name one of {', '.join(_THETAS)}"
        raise Unsupported(f"{text} for each of {num_layers:,} layers")
    width = _count(file, config, "local_attention", 128)
    if width < 2 and "sliding_attention" in kinds:
        raise Unsupported(f"{file}: local_attention is {width}; it must be at least 2")
    found: dict[str, Any] = {
        "layer_windows": tuple(width // 2 if kind == "sliding_attention" else 0 for kind in kinds),
        "global_theta": _theta(file, config, "full_attention", "global_rope_theta"),
        "local_theta": _theta(file, config, "sliding_attention", "local_rope_theta"),
        **{key: bool(config.get(key, False)) for key in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")},
    }
    if has_labels:
        pooling = config.get("classifier_pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise Unsupported(f"{file}: classifier_pooling {shown(repr(pooling))} is not served; served: cls, mean")
        activation = _activation(file, config, "classifier_activation")
        found |= {"pooling": pooling, "classifier_activation": activation}
    return found


def _theta(file: Path, config: dict[str, Any], kind: str, older: str) -> float:
    """The base of rope in layers of a kind: in ``rope_parameters``, or where transformers 4 wrote it."""
    ropes = config.get("rope_parameters") or {}
    rope = (ropes.get(kind) if isinstance(ropes, dict) else None) or {}
    scaling = config.get("rope_scaling") or rope
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise Unsupported(f"{file}: rope scaling {shown(repr(scaling))} is not served; only default is")
    theta = rope.get("rope_theta", config.get(older, _THETAS[kind]))
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 1 < theta < 1e12:
        raise Unsupported(f"{file}: the base of rope in {kind} layers is {shown(repr(theta))}; it must be above 1")
    return float(theta)


def _labels(file: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """The names of a classifier's labels, in the order of its logits."""
    names = config.get("id2label")
    if names is None:  # transformers leaves out its own default
        names = {str(i): f"LABEL_{i}" for i in range(_count(file, config, "num_labels", 2))}
    if not isinstance(names, dict) or not 1 <= len(names) <= MAX_LABELS:
        raise UnknownModel(f"{file}: id2label is {shown(repr(names))}; it must name 1 to {MAX_LABELS:,} labels")
    found = tuple(names.get(str(i)) for i in range(len(names)))
    wrong = next((i for i, name in enumerate(found) if not isinstance(name, str)), None)
    if wrong is not None:
        raise UnknownModel(f"{file}: id2label has no name for label {wrong} of {len(names):,}")
    return tuple(str(name) for name in found)


def _scores(file: Path, config: dict[str, Any], num_labels: int) -> Scores:
    """As sentence-transformers takes it: what the config names; otherwise a sigmoid of one logit, or a softmax."""
    named = config.get("sentence_transformers") or {}
    function = named.get("activation_fn") if isinstance(named, dict) else None
    function = function or config.get("sbert_ce_default_activation_function")
    if function is None:
        return "sigmoid" if num_labels == 1 else "softmax"
    kind = str(function).rpartition(".")[2].removesuffix("()")
    if kind not in _SCORES:
        raise Unsupported(f"{file}: scores by {shown(str(function))} are not served; served are {', '.join(_SCORES)}")
    return _SCORES[kind]


def _count(file: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise UnknownModel(f"{file}: {key} is {shown(repr(value))}; it must be a whole number")
    return value


def _modules(path: Path) -> dict[str, str]:
    """Kind and folder of each module in modules.json; none without that file."""
    file = path / "modules.json"
    if not file.is_file():
        return {}
    entries = read_value(file)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UnknownModel(f"{file} holds no list of modules")
    found: dict[str, str] = {}
    for entry in entries:
        kind, folder = str(entry.get("type")).rpartition(".")[2], str(entry.get("path", ""))
        if kind not in _MODULES or kind in found:
            known = ", ".join(_MODULES)
            raise Unsupported(f"{file}: module {shown(kind)} is not served; served are one each of {known}")
        if Path(folder).name != folder:
            raise UnknownModel(f"{file}: module {kind} has the path {shown(repr(folder))}; it must be a folder's name")
        found[kind] = folder
    if list(found)[:2] != ["Transformer", "Pooling"]:
        raise Unsupported(f"{file}: modules {', '.join(found) or 'none'}; served are Transformer, Pooling, Normalize")
    return found


def _pooling(path: Path, folder: str | None) -> tuple[Pooling, bool]:
    """And whether pooling counts the prompt's tokens."""
    if folder is None:
        return "mean", True
    file = path / folder / "config.json"
    config = read_json(file)
    if "pooling_mode" in config:  # the spelling since sentence-transformers 5.2
        modes = [str(config["pooling_mode"])]
        known: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
    else:
        modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        known = _POOLINGS
    if len(modes) != 1 or modes[0] not in known:
        names = ", ".join(map(shown, modes)) or "none"
        raise Unsupported(f"{file}: pooling by {names} is not served; served is one of {', '.join(known)}")
    return known[modes[0]], bool(config.get("include_prompt", True))


def _prompt(path: Path) -> str:
    """The text that sentence-transformers puts before each text."""
    file = path / "config_sentence_transformers.json"
    if not file.is_file():
        return ""
    config = read_json(file)
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts, dict) or not isinstance(prompts.get(name), str):
        raise UnknownModel(f"{file}: default_prompt_name {shown(repr(name))} is not among its prompts")
    return str(prompts[name])


def _text_rules(path: Path, folder: str, num_positions: int) -> tuple[int, bool]:
    """The longest text, and whether texts are made lower case."""
    file = path / folder / "sentence_bert_config.json"
    rules = read_json(file) if file.is_file() else {}
    longest = rules.get("max_seq_length")
    if longest is None and (path / "tokenizer_config.json").is_file():
        longest = read_json(path / "tokenizer_config.json").get("model_max_length")
    if not isinstance(longest, int) or longest < 1:
        longest = num_positions
    return min(longest, num_positions), bool(rules.get("do_lower_case", False))
