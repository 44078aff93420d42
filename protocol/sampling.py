"""How tokens are chosen: one struct for every path that generates. Never samples anything."""

import msgspec

MAX_LOGPROBS = 100


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling of one generation. ``msgspec.structs.replace`` merges; field lists are never copied by hand.

    Order of application: grammar mask, logit_bias, penalties, temperature, top_k, top_p, min_p, then one draw.
    ``temperature == 0`` is greedy. ``top_k == -1`` is off. ``seed`` fixes the draw of each position whatever the
    batch; without it the engine's own seed is used. ``heal``: where the prompt
    ends in text, its last tokens are given back and the generation begins with their text (token healing).
    ``stop_regex`` ends the text like ``stop``, as soon as a pattern matches up to here.
    ``speculative``: whether tokens may be guessed ahead, which changes none of them; None: as the program does.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    skip_special_tokens: bool = True
    heal: bool = False
    speculative: bool | None = None

    def faults(self, *, vocab_size: int | None = None) -> list[str]:
        """Every reason why these parameters cannot be served; empty when they can."""
        found: list[str] = []

        def check(name: str, holds: bool, limit: str) -> None:
            if not holds:
                found.append(f"{name}={getattr(self, name)!r}: must be {limit}")

        check("max_tokens", self.max_tokens >= 0, ">= 0")
        check("min_tokens", 0 <= self.min_tokens <= max(self.max_tokens, 0), "between 0 and max_tokens")
        check("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        check("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        check("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or >= 1")
        check("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2")
        check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2")
        check("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "in (0, 10]")
        check("top_logprobs_num", 0 <= self.top_logprobs_num <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")
        check("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a signed 64-bit integer")
        check("stop", all(self.stop), "non-empty strings")
        check("stop_regex", all(self.stop_regex), "non-empty patterns")
        check("logprob_start_len", self.logprob_start_len >= -1, "-1 (generated tokens only) or >= 0")
        if vocab_size is not None:
            in_vocab = all(0 <= t < vocab_size for t in (*self.stop_token_ids, *self.logit_bias))
            check("stop_token_ids", in_vocab, f"token ids below {vocab_size} (logit_bias too)")
        return found
