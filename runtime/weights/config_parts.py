"""The parts of a decoder's config that only a few families have."""

from typing import Literal

import msgspec

from ...protocol.errors import Unsupported


class Latent(msgspec.Struct, frozen=True):
    """The sizes of multi-head latent attention (DeepSeek-AI, 2024: DeepSeek-V2).

    The keys and values of all heads are products of one vector of ``size``, the latent. A head's key is ``nope_dim``
    dimensions of the latent and ``rope_dim`` rotated ones, which all heads have in common. A slot holds the rotated
    part, then the latent. With ``query_size`` queries are products of a vector of that size, with its own norm.
    """

    size: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_size: int = 0
    is_interleaved: bool = True  # in the file, the two dimensions of a rotated pair are neighbours
    is_split: bool = False  # the file holds two tensors instead of ``kv_b``, one for keys and one for values

    def __post_init__(self) -> None:
        for field in ("size", "rope_dim", "nope_dim", "value_dim"):
            if getattr(self, field) < 1:
                raise Unsupported(f"model config: {field} of latent attention is 0; it must be at least 1")
        if self.rope_dim % 2:
            raise Unsupported(f"model config: {self.rope_dim} rotated dimensions; rope needs an even number")

    @property
    def slot_dim(self) -> int:
        """Numbers that a slot holds."""
        return self.rope_dim + self.size

    @property
    def query_dim(self) -> int:
        """Dimensions of a query head in the file."""
        return self.nope_dim + self.rope_dim


class Routing(msgspec.Struct, frozen=True):
    """How a token chooses its experts, where that is more than the likeliest by softmax.

    Experts have ``scoring`` of the router's logits as scores, and are chosen by score plus a bias of the file if
    ``has_bias``. They lie in ``num_groups`` groups, of which a token takes the best ``groups_taken``: by the highest
    score of a group for softmax, by the sum of the two highest for sigmoid. Weights are the scores without the bias,
    times ``scale``.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    groups_taken: int = 1
    scale: float = 1.0
    has_bias: bool = False

    def check(self, num_experts: int, experts_per_token: int) -> None:
        """Raises Unsupported where a token could not take as many experts."""
        if self.num_groups < 1 or num_experts % self.num_groups:
            raise Unsupported(f"model config: {num_experts} experts cannot lie in {self.num_groups} equal groups")
        if not 0 < self.groups_taken <= self.num_groups:
            raise Unsupported(
                f"model config: {self.groups_taken} groups of experts a token; it must be between 1 and "
                f"{self.num_groups}"
            )
        size = num_experts // self.num_groups
        if self.num_groups > 1 and self.scoring == "sigmoid" and size < 2:
            raise Unsupported("model config: groups of one expert; groups are chosen by their two best")
        if experts_per_token > size * self.groups_taken:
            raise Unsupported(
                f"model config: {experts_per_token} experts a token of {self.groups_taken} groups of {size} experts"
            )
