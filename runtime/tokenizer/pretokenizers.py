"""The pre-tokenizers that GGUF files name: how a text is cut before byte pairs are merged inside each cut.

A GGUF file holds only a name (``tokenizer.ggml.pre``); the cuts here are those of the tokenizer.json files that the
names stand for. An unknown name is refused: wrong cuts would give tokens that the model was not trained on.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from ...protocol.errors import Unsupported

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"

_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_TAIL}"
TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_TAIL}"

_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    rf"|{_REST}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
_DIGITS = (r"\p{N}", GPT2)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """``cuts`` apply one after the other, each inside the pieces of the one before.

    ``ignore_merges``: a piece that is itself a token is not built by merges. ``nfc``: text is NFC-normalised first.
    """

    cuts: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in self.cuts]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((QWEN2,), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), PreTokenizer((GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), PreTokenizer(_DIGITS)
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "stablelm2": PreTokenizer((QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((GPT4O,))),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "falcon": PreTokenizer(_FALCON),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
}


def pre_tokenizer(name: str, *, source: str) -> PreTokenizer:
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise Unsupported(
            f"{source}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not served; served are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}; the model's folder with its tokenizer.json works without a name"
        )
    return found
