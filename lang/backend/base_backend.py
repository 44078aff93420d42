"""``BaseBackend``: the interface of a backend, with SGLang's method names, so that third parties' backends work.

A subclass defines ``generate``, and ``generate_stream`` and ``select`` if its API supports them. If it defines
``async def generate_async(self, s, sampling_params)``, that is called instead and no thread waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ...protocol.errors import InvalidRequest, Unsupported
from ...protocol.messages import ProgramSettings
from ..chat_template import ChatTemplate, get_chat_template
from ..choices import ChoicesDecision, ChoicesSamplingMethod
from ..nodes import Leading
from ..sampling_params import SglSamplingParams
from ..session import RunTerms, Session, Turn
from .executor import StreamExecutor


class BaseBackend:
    """A subclass must define ``generate`` only."""

    model_name: str | None = None
    support_concate_and_append: bool = False
    is_chat_model: bool = False
    precache_in_batch: bool = True  # run_batch() calls cache_nodes() first
    has_own_loop: bool = False  # generate_async() runs on the backend's loop instead of the program's
    max_threads: int = 256  # how many generations may block at once
    chat_template: ChatTemplate | None = None
    asks_before_run: bool = False  # choose() waits for a model
    served_settings: frozenset[str] = frozenset(("deadline_s", "name"))  # a run that sets another is refused

    def check_settings(self, settings: ProgramSettings) -> None:
        """Raises InvalidRequest for a setting of a run that this backend does not serve."""
        if settings == ProgramSettings(name=settings.name):  # once per run: most runs set nothing
            return
        for field in msgspec.structs.fields(settings):
            value = getattr(settings, field.name)
            if value != field.default and field.name not in self.served_settings:
                raise InvalidRequest(
                    f"{field.name}={value!r}: a run on {type(self).__name__} has no such setting; leave it out, or run "
                    "on a phloem.Runtime",
                    where=field.name,
                )

    def choose(self, prompt: Sequence[Any], settings: ProgramSettings, *, stream: bool) -> Turn | None:
        """Where a run goes, by the arguments of its program; None: to this backend."""
        return None

    def open_session(self, run: RunTerms) -> Session | None:
        """This backend's side of one run. None: an ``InterpretedSession`` makes one call per generation."""
        return None

    @property
    def identity(self) -> Any:
        """Backends with the same identity share the traces of compiled programs."""
        return self

    def get_model_name(self) -> str:
        if self.model_name is None:
            raise Unsupported(f"{type(self).__name__} does not know its model's name")
        return self.model_name

    def get_chat_template(self) -> ChatTemplate:
        return self.chat_template or get_chat_template("default")

    def cache_prefix(self, prefix_str: str) -> None:
        """Called before many programs that begin with ``prefix_str``."""

    def cache_nodes(self, nodes: Sequence[Leading]) -> None:
        """``cache_prefix`` for the texts and role markers that programs begin with."""
        self.cache_prefix("".join(node.text for node in nodes))

    def pin_nodes(self, nodes: Sequence[Leading], ttl_s: float) -> int | None:
        """Cache the nodes and protect them from eviction for ``ttl_s``; 0 ends the protection."""
        if ttl_s > 0:
            self.cache_nodes(nodes)
        return None

    def uncache_prefix(self, rid: str) -> None: ...

    def end_request(self, rid: str | Sequence[str]) -> None: ...

    def begin_program(self, s: StreamExecutor) -> None: ...

    def end_program(self, s: StreamExecutor | Sequence[StreamExecutor]) -> None: ...

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """Called at a fork into several, once everything before it has been computed."""

    def fork_program(self, src: StreamExecutor, dst: list[StreamExecutor], position_ids_offset: Any = None) -> None: ...

    def fill_image(self, s: StreamExecutor) -> None:
        """Called after an image was appended."""
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
