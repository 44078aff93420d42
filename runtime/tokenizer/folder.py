"""The tokenizer and the chat template of a Hugging Face folder: tokenizer.json and the files beside it.

The file's pre-tokenizer and merge rules are used unchanged. Its rules for special tokens and for a space before the
first word are removed: ``Tokenizer`` does both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from ...protocol.errors import UnknownModel, Unsupported
from ..weights.damage import shown
from .special_names import HiddenNames, end_of_text_ids, looks_like_control
from .spelling import SPACE, byte_level_bytes, sentencepiece_bytes
from .tokenizer import SpecialIds, SpecialToken, Tokenizer, VocabTable


def folder_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UnknownModel(f"{path} has no tokenizer.json; give a folder that has one, or a .gguf file")
    spec = _read_json(file)
    return _Folder(path, file, spec).tokenizer()


def folder_template(path: Path) -> str | None:
    """chat_template.jinja where there is one, otherwise the entry of tokenizer_config.json (the one named default)."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownModel(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnknownModel(f"{file} holds a {type(value).__name__}, not a JSON object")
    return value


MOST_UNUSED = 100_000  # ids without a token, beside three for each token


class _Folder:
    def __init__(self, path: Path, file: Path, spec: dict[str, Any]) -> None:
        self.path, self.file, self.spec = path, file, spec
        self.config = _read_json(path / "tokenizer_config.json")
        self.added: dict[int, dict[str, Any]] = {int(token["id"]): token for token in spec.get("added_tokens") or []}
        self.model: dict[str, Any] = spec.get("model") or {}
        self.texts, self.unused = self._texts()
        self.special = {
            token_id: SpecialToken(token["content"], bool(token.get("lstrip")), bool(token.get("rstrip")))
            for token_id, token in self.added.items()
            if token.get("special") or looks_like_control(token["content"])
        }

    def tokenizer(self) -> Tokenizer:
        ids = self._special_ids()
        token_bytes = self._token_bytes()
        prefix_space = self._take_prefix_space()
        self._hide_special()
        self.spec.update(post_processor=None, truncation=None, padding=None)
        try:
            backend = Backend.from_str(json.dumps(self.spec))
        except Exception as error:  # the library raises nothing more exact
            raise UnknownModel(f"{self.file} cannot be read as a tokenizer: {error}") from error
        for i, token in self.added.items():
            if i not in self.special and backend.token_to_id(token["content"]) != i:
                raise Unsupported(f"{self.file}: added token {token['content']!r} shares its spelling with another")
        table = VocabTable(self.texts, token_bytes, self.special, self.unused)
        return Tokenizer(backend, table, ids, prefix_space=prefix_space)

    # -- the vocabulary -----------------------------------------------------------------------------------------------

    def _texts(self) -> tuple[list[str], frozenset[int]]:
        """The spelling of every id, and the unused ids."""
        kind, vocab = self.model.get("type"), self.model.get("vocab")
        if kind is None and "merges" in self.model:
            kind = "BPE"
        if kind == "BPE" and isinstance(vocab, dict):
            ids = {int(token_id): text for text, token_id in vocab.items()}
        elif kind == "Unigram" and isinstance(vocab, list):
            ids = {token_id: entry[0] for token_id, entry in enumerate(vocab)}
        else:
            raise Unsupported(f"{self.file}: a {kind} model is not served; served are BPE and Unigram")
        ids |= {token_id: token["content"] for token_id, token in self.added.items()}
        if not ids:
            raise UnknownModel(f"{self.file} has an empty vocabulary")
        odd = [text for text in ids.values() if not isinstance(text, str)]
        if odd:
            raise UnknownModel(f"{self.file}: a token is {shown(repr(odd[0]))}; it must be a text")
        size = max(ids) + 1
        if min(ids) < 0 or size > MOST_UNUSED + 4 * len(ids):
            raise UnknownModel(f"{self.file}: token ids from {min(ids):,} to {size - 1:,} for {len(ids):,} tokens")
        return [ids.get(i, f"[unused {i}]") for i in range(size)], frozenset(range(size)) - ids.keys()

    def _token_bytes(self) -> list[bytes]:
        is_byte_level = self._is_byte_level()
        spell = byte_level_bytes if is_byte_level else sentencepiece_bytes
        found = []
        for token_id, text in enumerate(self.texts):
            if token_id in self.special or token_id in self.unused:
                found.append(b"")
            elif token_id in self.added and is_byte_level:
                found.append(text.encode("utf-8"))
            else:
                found.append(spell(text))
        return found

    def _is_byte_level(self) -> bool:
        kinds = {step.get("type") for step in _steps(self.spec.get("decoder"), "decoders")}
        if "ByteLevel" in kinds:
            return True
        if kinds & {"Metaspace", "Replace", "ByteFallback"}:
            return False
        raise Unsupported(
            f"{self.file}: decoder {sorted(map(str, kinds)) or 'none'} is not served; served are ByteLevel, "
            "Metaspace and byte fallback"
        )

    # -- special tokens -----------------------------------------------------------------------------------------------

    def _special_ids(self) -> SpecialIds:
        generation, config = _read_json(self.path / "generation_config.json"), _read_json(self.path / "config.json")
        special_map = _read_json(self.path / "special_tokens_map.json")
        id_of = {text: token_id for token_id, text in enumerate(self.texts)}

        def named(role: str) -> int | None:
            entry = self.config.get(f"{role}_token") or special_map.get(f"{role}_token")
            text = entry.get("content") if isinstance(entry, dict) else entry
            return id_of.get(text) if isinstance(text, str) else None

        stated: list[int] = []
        for source in (generation, config):
            value = source.get("eos_token_id")
            stated += [int(i) for i in (value if isinstance(value, list) else [] if value is None else [value])]
        eos = named("eos")
        ends = {i for i in stated if i < len(self.texts)} | ({eos} if eos is not None else set())
        ends |= end_of_text_ids({token.text: i for i, token in self.special.items()})
        if not ends:
            raise UnknownModel(
                f"{self.path} names no end-of-text token; set eos_token in tokenizer_config.json or eos_token_id in "
                "generation_config.json"
            )
        for token_id in ends:
            self.special.setdefault(token_id, SpecialToken(self.texts[token_id]))
        bos = named("bos")
        if bos is None and isinstance(config.get("bos_token_id"), int) and config["bos_token_id"] in self.special:
            bos = config["bos_token_id"]
        return SpecialIds(
            eos_ids=frozenset(ends),
            eos_id=eos if eos is not None else (stated[0] if stated else min(ends)),
            bos_id=bos,
            add_bos=bos is not None and self._adds_bos(self.texts[bos]),
            unk_id=named("unk"),
            pad_id=named("pad"),
            text_end_id=self._text_end_id(id_of, eos),
        )

    def _adds_bos(self, bos_text: str) -> bool:
        """Whether BOS comes first, by tokenizer.json's post-processor, else by the flag in tokenizer_config.json."""
        pieces = self._template()
        if pieces is None:
            return bool(self.config.get("add_bos_token", False))
        return bool(pieces and pieces[0].get("SpecialToken", {}).get("id") == bos_text)

    def _text_end_id(self, id_of: dict[str, int], eos: int | None) -> int | None:
        """The special token that comes last, by the same two files."""
        pieces = self._template()
        if pieces is None:
            return eos if self.config.get("add_eos_token", False) else None
        text = pieces[-1].get("SpecialToken", {}).get("id") if len(pieces) > 1 else None
        return id_of.get(text) if isinstance(text, str) else None

    def _template(self) -> list[dict[str, Any]] | None:
        """The pieces of a text by tokenizer.json's post-processor: special tokens and the text; None: it has none."""
        for step in _steps(self.spec.get("post_processor"), "processors"):
            if step.get("type") == "TemplateProcessing":
                return list(step.get("single") or [])
        return None

    def _hide_special(self) -> None:
        """Renames special tokens in the backend, so that no text can become one.

        The model keeps an entry for every id, under a name that no user can write, so other ids do not change.
        """
        self.spec["added_tokens"] = [token for i, token in self.added.items() if i not in self.special]
        vocab, hidden = self.model["vocab"], HiddenNames()
        names = [hidden[i] if i in self.special or i in self.unused else text for i, text in enumerate(self.texts)]
        if isinstance(vocab, list):
            self.model["vocab"] = [[name, vocab[i][1] if i < len(vocab) else 0.0] for i, name in enumerate(names)]
            return
        self.model["vocab"] = known = {name: i for i, name in enumerate(names)}
        unk = self.model.get("unk_token")
        if unk is not None:
            self.model["unk_token"] = names[vocab[unk]] if unk in vocab else None
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in self.model.get("merges") or []]
        self.model["merges"] = [[a, b] for a, b in pairs if a in known and b in known and a + b in known]

    # -- the space before the first word ------------------------------------------------------------------------------

    def _take_prefix_space(self) -> bool:
        """Removes the rule, so that text in the middle of a sequence gets no space; returns whether there was one."""
        found = False
        steps = _steps(self.spec.get("normalizer"), "normalizers")
        kept = [step for step in steps if not (step.get("type") == "Prepend" and step.get("prepend") == SPACE)]
        if len(kept) < len(steps):
            found = True
            self.spec["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
        for step in _steps(self.spec.get("pre_tokenizer"), "pretokenizers"):
            if step.get("type") == "Metaspace":
                found = found or step.get("prepend_scheme", "always") != "never"
                step["prepend_scheme"] = "never"
                step.pop("add_prefix_space", None)
            elif step.get("type") == "ByteLevel":
                found = found or bool(step.get("add_prefix_space"))
                step["add_prefix_space"] = False
        return found


def _steps(rule: dict[str, Any] | None, plural: str) -> list[dict[str, Any]]:
    """The steps of a rule, which may be one step or a nested sequence of steps."""
    if not rule:
        return []
    if rule.get("type") == "Sequence":
        return [step for inner in rule.get(plural) or [] for step in _steps(inner, plural)]
    return [rule]
