"""The operations a program is made of, as frozen values.

Every accepted op ends in exactly one ``Done`` or ``Failed``. Ops of one sequence run in the order submitted;
sequences run as their inputs allow. ``op`` and ``seq`` ids are chosen by the client and unique in their program.
"""

from typing import Literal

import msgspec

from ..constrained.spec import GrammarSpec
from .sampling import SamplingParams

ChoicesMethod = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
JoinMode = Literal["gather_variable", "concate_and_append"]
Pooling = Literal["last", "mean"]


class Op(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="t"):
    op: int
    seq: int


class Text(Op, tag="text"):
    """Append ``text``; never parsed for special tokens. Done value: None."""

    text: str


class Special(Op, tag="special"):
    """Append template or control tokens. Done value: None."""

    ids: tuple[int, ...]


class Ref(Op, tag="ref"):
    """Append the text of candidate ``index`` that op ``source`` of the program produces. Done value: the text."""

    source: int
    index: int = 0


class Image(Op, tag="image"):
    """Append an image's tokens. Done value: None.

    ``data`` is a JPEG, PNG, WebP or GIF file (of which the first frame counts), and ``hash`` its SHA-256 in hexadecimal
    digits. A later op of the program may leave out the data of an image that it has sent.
    """

    hash: str
    data: bytes = b""


class Drawn(msgspec.Struct, frozen=True, array_like=True):
    """A candidate's output that is known from an engine that computed it. ``text`` is set where it had ended."""

    token_ids: tuple[int, ...]
    text: str | None = None


class Gen(Op, tag="gen"):
    """Generate. Done value: list of ``n`` texts; the sequence continues with the first.

    Done meta: see ``messages.GenMeta``. With ``stream`` every new piece of text is also sent as a ``Delta``.

    ``drawn``, empty or one for each candidate, replays an op of another engine. Where every candidate has a text, the
    op ends at once with these texts and tokens, and nothing is computed. Otherwise no candidate has one: each repeats
    its tokens as if they had just been drawn (grammar, stops, one delta for them all) and draws on from there. The
    repeated tokens have no log-probabilities, so an op that returns the prompt's, or is traced, cannot go on so.
    """

    params: SamplingParams = SamplingParams()
    grammar: GrammarSpec | None = None
    n: int = 1
    stream: bool = False
    drawn: tuple[Drawn, ...] = ()


class Select(Op, tag="select"):
    """Score ``choices`` as forks of one prefix and append the winner. Done value: the winner.

    ``append=False`` only scores. Done meta: see ``messages.SelectMeta``.
    """

    choices: tuple[str, ...]
    method: ChoicesMethod = "token_length_normalized"
    append: bool = True


class Score(Op, tag="score"):
    """Log-probabilities of ``text`` as continuation. Done value: their sum (natural log)."""

    text: str
    append: bool = True


class Embedding(Op, tag="embedding"):
    """The vector of the sequence so far. Done value: ``Welcome.embedding_size`` numbers, little-endian float32.

    The model's last hidden states, after its final norm, are pooled and scaled to length 1: ``last`` takes the last
    token's, ``mean`` the mean of all tokens'. A text at the sequence's end is followed by the token that the model's
    tokenizer puts after texts, if it has one; the sequence itself does not change.
    """

    pooling: Pooling = "last"


class Fork(Op, tag="fork"):
    """``children`` start as this sequence at this point; no KV is copied. Done value: None."""

    children: tuple[int, ...]


class Join(Op, tag="join"):
    """Wait for every op submitted so far on ``children``. Done value: None.

    ``concate_and_append`` also appends the children's suffixes (what each holds beyond its fork), in order.
    """

    children: tuple[int, ...]
    mode: JoinMode = "gather_variable"


class Mark(Op, tag="mark"):
    """Without ``begin``: remember this point. With ``begin`` (op of such a mark): Done value is the text since."""

    begin: int | None = None


class Rollback(Op, tag="rollback"):
    """Return to the point of mark ``to``; the sequence drops the text after it. Done value: None."""

    to: int


class Pin(Op, tag="pin"):
    """Keep the sequence's KV so far for ``ttl_s`` seconds (0 unpins). Done value: number of tokens pinned."""

    ttl_s: float


class Close(Op, tag="close"):
    """The sequence ends. The program is closed when all its sequences are. Done value: the sequence's text."""


AnyOp = Text | Special | Ref | Image | Gen | Select | Score | Embedding | Fork | Join | Mark | Rollback | Pin | Close
