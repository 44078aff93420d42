"""What a backend is to the language: SGLang's method names, so that a third party's backend plugs in.

Subclass it and write ``generate`` (and ``generate_stream``, ``select`` where the API can). An optional
``async def generate_async(self, s, sampling_params)`` is preferred where present: no thread then waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...protocol.errors import Unsupported
from ..chat_template import ChatTemplate, get_chat_template
from ..choices import ChoicesDecision, ChoicesSamplingMethod
from ..expressions import SglSamplingParams
from ..nodes import Leading

if TYPE_CHECKING:
    from ..program import Program, Session
    from .executor import StreamExecutor


class BaseBackend:
    """Every method but ``generate`` may stay as it is."""

    support_concate_and_append: bool = False
    is_chat_model: bool = False
    precache_in_batch: bool = True  # run_batch() calls cache_nodes() first
    has_own_loop: bool = False  # generate_async() runs on one loop of the backend, not on that of the program
    max_threads: int = 256  # generations that may block at once
    chat_template: ChatTemplate | None = None

    def open_session(self, program: Program) -> Session:
        """This backend's side of one program: node by node, one call per generation."""
        from .interpreted import InterpretedSession

        return InterpretedSession(self, program)

    @property
    def identity(self) -> Any:
        """What is the same for two backends that are the same to a compiled program."""
        return self

    def get_model_name(self) -> str:
        raise Unsupported(f"{type(self).__name__} does not tell its model's name")

    def get_chat_template(self) -> ChatTemplate:
        return self.chat_template or get_chat_template("default")

    def cache_prefix(self, prefix_str: str) -> None:
        """Told before many programs that begin with ``prefix_str``."""

    def cache_nodes(self, nodes: Sequence[Leading]) -> None:
        """The same for what programs begin with: texts and roles."""
        self.cache_prefix("".join(node.text for node in nodes))

    def pin_nodes(self, nodes: Sequence[Leading], ttl_s: float) -> int | None:
        """Cache them and keep them for ``ttl_s``; 0 ends it."""
        if ttl_s > 0:
            self.cache_nodes(nodes)
        return None

    def uncache_prefix(self, rid: str) -> None: ...

    def end_request(self, rid: str | Sequence[str]) -> None: ...

    def begin_program(self, s: StreamExecutor) -> None: ...

    def end_program(self, s: StreamExecutor | Sequence[StreamExecutor]) -> None: ...

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """Told at a fork of several, when all before it is done."""

    def fork_program(self, src: StreamExecutor, dst: list[StreamExecutor], position_ids_offset: Any = None) -> None: ...

    def fill_image(self, s: StreamExecutor) -> None:
        """Told after an image was appended."""
        raise Unsupported(f"{type(self).__name__} takes no images")

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str | list[str], dict[str, Any]]:
        raise Unsupported(f"{type(self).__name__} has no generate(); write it, or generate_async()")

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        text, meta = self.generate(s, sampling_params)
        yield (text if isinstance(text, str) else text[0]), meta

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod | None = None,
    ) -> ChoicesDecision:
        raise Unsupported(
            f"{type(self).__name__} has no select(); ask with gen() and name the choices in the prompt instead"
        )

    def concatenate_and_append(self, src_rids: list[str], dst_rid: str) -> None:
        raise Unsupported(f"{type(self).__name__} cannot append one program's tokens to another's")

    def shutdown(self) -> None: ...

    def flush_cache(self) -> bool:
        return False

    def get_server_info(self) -> dict[str, Any] | None:
        return None


def as_backend(target: Any) -> BaseBackend:
    """The backend behind what users hold: a backend, a Runtime or Engine (``.endpoint``, ``.client``), or a client."""
    if isinstance(target, BaseBackend):
        return target
    for name in ("endpoint", "backend"):
        inner = getattr(target, name, None)
        if isinstance(inner, BaseBackend):
            return inner
    client = target if _is_client(target) else getattr(target, "client", None)
    if client is not None and _is_client(client):
        from .phloem_backend import PhloemBackend

        return PhloemBackend(client)
    if isinstance(target, str) and "://" in target:
        raise Unsupported(f"{target!r} is an address, no backend; write backend=phloem.RuntimeEndpoint({target!r})")
    raise Unsupported(
        f"{target!r} is no backend; give a phloem.Runtime, a phloem.Engine, phloem.connect(...), or a BaseBackend"
    )


def _is_client(target: Any) -> bool:
    submit: Callable[..., Any] | None = getattr(target, "submit", None)
    return callable(submit) and hasattr(target, "welcome")
