"""The sampling of one generation under SGLang's names, and what the APIs of others make of it.

A parameter that an API does not have is refused by name. Never speaks to a network.
"""

import dataclasses
import json
from typing import Any

from ..protocol.errors import InvalidRequest

# what no foreign chat API has
_OURS_ALONE = ("stop_token_ids", "stop_regex", "ignore_eos", "min_new_tokens", "repetition_penalty")


@dataclasses.dataclass(slots=True)
class SglSamplingParams:
    """The sampling of one generation as a ``BaseBackend`` receives it, under SGLang's names.

    ``stop`` and the lists are tuples; ``None`` means that the backend's own default holds.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    json_schema: str | None = None
    dtype: Any = None
    regex: str | None = None
    ebnf: str | None = None

    def clone(self) -> "SglSamplingParams":
        return dataclasses.replace(self)

    def to_openai_kwargs(self) -> dict[str, Any]:
        """Of a completions or chat call; what that API does not know is refused by name."""
        self._refuse("OpenAI", "top_k", "min_p", "regex", "ebnf", *_OURS_ALONE)
        kwargs: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "stop": list(self.stop) or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }
        if self.n > 1:
            kwargs["n"] = self.n
        if self.seed is not None:
            kwargs["seed"] = self.seed
        if self.logit_bias:
            kwargs["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return kwargs

    def to_anthropic_kwargs(self) -> dict[str, Any]:
        refused = ("n", "min_p", "regex", "ebnf", "json_schema", "frequency_penalty", "presence_penalty", "seed")
        self._refuse("Anthropic", *refused, "logit_bias", "return_logprob", *_OURS_ALONE)
        kwargs: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "stop_sequences": list(self.stop),
            "temperature": min(self.temperature, 1.0),
        }
        if self.top_p != 1.0:
            kwargs["top_p"] = self.top_p
        if self.top_k != -1:
            kwargs["top_k"] = self.top_k
        return kwargs

    def to_litellm_kwargs(self) -> dict[str, Any]:
        self._refuse("LiteLLM", "return_logprob")
        kwargs = self.to_openai_kwargs()
        if self.json_schema is not None:
            kwargs["response_format"] = self.response_format()
        return kwargs

    def response_format(self) -> dict[str, Any]:
        """Of an OpenAI-like chat call: what ``json_schema`` asks for."""
        assert self.json_schema is not None
        schema = {"name": "answer", "schema": json.loads(self.json_schema), "strict": True}
        return {"type": "json_schema", "json_schema": schema}

    def to_vertexai_kwargs(self) -> dict[str, Any]:
        """Of a ``generate_content`` call: its ``config``."""
        self._refuse("Vertex AI", "min_p", "regex", "ebnf", "logit_bias", "return_logprob", *_OURS_ALONE)
        kwargs: dict[str, Any] = {
            "max_output_tokens": self.max_new_tokens,
            "stop_sequences": list(self.stop),
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        if self.top_k != -1:
            kwargs["top_k"] = self.top_k
        if self.n > 1:
            kwargs["candidate_count"] = self.n
        for name in ("frequency_penalty", "presence_penalty"):
            if value := getattr(self, name):
                kwargs[name] = value
        if self.seed is not None:
            kwargs["seed"] = self.seed
        return kwargs

    def to_srt_kwargs(self) -> dict[str, Any]:
        """Of ``POST /generate``: field ``sampling_params``."""
        kwargs: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "n": self.n,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "stop_regex": list(self.stop_regex),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "ignore_eos": self.ignore_eos,
        }
        for name in ("regex", "json_schema", "ebnf"):
            if (value := getattr(self, name)) is not None:
                kwargs[name] = value
        if self.repetition_penalty != 1.0:
            kwargs["repetition_penalty"] = self.repetition_penalty
        if self.logit_bias:
            kwargs["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if self.seed is not None:
            kwargs["sampling_seed"] = self.seed
        return kwargs

    def _refuse(self, api: str, *names: str) -> None:
        default = SglSamplingParams()
        for name in names:
            if (value := getattr(self, name)) != getattr(default, name) and value is not False:
                raise InvalidRequest(f"{name}={value!r}: the {api} API has no such parameter; leave it out", where=name)
