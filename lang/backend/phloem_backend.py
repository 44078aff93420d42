"""The compiled path: a session sends all queued nodes as operations in one ``Submit``.

A client is any object with ``welcome, submit, cancel, query, close``.
"""

from __future__ import annotations

import itertools
import re
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from ...protocol import ops
from ...protocol.errors import (
    Cancelled,
    DependencyFailed,
    InvalidRequest,
    PhloemError,
    Unsupported,
    from_info,
)
from ...protocol.messages import Closed, Delta, Done, ProgramSettings, RoleTemplate
from ...protocol.program_call import OpFailed, ProgramCall, ProgramEvent, SubmitRefused
from ...protocol.tool_format import ToolFormat
from ..chat_template import ChatTemplate
from ..chat_template import from_info as template_from_info
from ..expressions import SglGen
from ..nodes import (
    CloseNode,
    DefaultSystemNode,
    ForkNode,
    GenNode,
    ImageNode,
    JoinNode,
    Leading,
    MarkNode,
    Node,
    PasteNode,
    PinNode,
    RoleNode,
    RollbackNode,
    SelectNode,
    TextNode,
    TextSinceNode,
    TokensNode,
)
from ..sampling_params import merge_sampling
from ..session import RunTerms
from ..settling import AskingNode
from ..values import Leaf
from .base_backend import BaseBackend


class PhloemBackend(BaseBackend):
    """A runtime of Phloem, which receives whole programs."""

    served_settings = frozenset(ProgramSettings.__struct_fields__)
    precache_in_batch = False  # the runtime computes a shared prefix once, even if all programs need it together

    def __init__(self, client: Any) -> None:
        self.client = client
        self._prefix = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        url = getattr(self.client, "url", "")
        return f"<PhloemBackend {self.client.welcome.model}{f' at {url}' if url else ''}>"

    def new_program_id(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    @property
    def identity(self) -> Any:
        return self.client

    def open_session(self, run: RunTerms) -> CompiledSession:
        return CompiledSession(self, run.lock, run.settings)

    def get_model_name(self) -> str:
        return self.client.welcome.model

    def get_chat_template(self) -> ChatTemplate:
        return template_from_info(self.client.welcome.template)

    def cache_prefix(self, prefix_str: str) -> None:
        """Compute a text's KV ahead of the programs that begin with it."""
        self.cache_nodes([TextNode(0, prefix_str)])

    def cache_nodes(self, nodes: Sequence[Leading]) -> None:
        self._prefill(nodes, None)

    def pin_nodes(self, nodes: Sequence[Leading], ttl_s: float) -> int | None:
        return self._prefill(nodes, ttl_s)

    def _prefill(self, nodes: Sequence[Leading], ttl_s: float | None) -> int | None:
        lock = threading.Lock()
        done = Leaf(lock, None)
        shipped: list[Node] = [*nodes, GenNode(0, done, SglGen(None, {"max_tokens": 0}), {}, 1, False)]
        if ttl_s is not None:
            done = Leaf(lock, None)
            shipped.append(PinNode(0, done, ttl_s))
        CompiledSession(self, lock, None).ship([*shipped, CloseNode(0)])
        done.wait_for(done.done)
        pinned = done.read()
        return pinned if ttl_s is not None else None

    def flush_cache(self) -> bool:
        self.client.query("flush_cache")
        return True

    def get_server_info(self) -> dict[str, Any] | None:
        return self.client.query("info")

    def shutdown(self) -> None:
        self.client.close()


class CompiledSession:
    """One program at the runtime: its op ids and the leaves that wait for them.

    ``_on_event`` runs on the client's thread, ``ship`` on the program's.
    """

    decides_custom_choices = False

    def __init__(self, backend: PhloemBackend, lock: threading.Lock, settings: ProgramSettings | None) -> None:
        self._client = backend.client
        self._settings = settings
        self._template = backend.client.welcome.template
        welcome = backend.client.welcome
        self.eos_ids: frozenset[int] | None = frozenset((*welcome.eos_ids, *welcome.template.stop_token_ids))
        self._call = ProgramCall(backend.client, self._on_event, program=backend.new_program_id())
        self.closed = Leaf(lock, None)
        self._leaves: dict[int, Leaf] = {}
        self._error: PhloemError | None = None  # the first
        self._next_op = 0
        self._gaps: dict[int, str] = {}  # by sequence: what a text that comes next begins with

    # -- roles --------------------------------------------------------------------------------------------------------

    def default_system(self) -> tuple[str, str] | None:
        template = self._template
        if not template.default_system:
            return None
        text = template.default_system_text
        around = template.roles.get("system", RoleTemplate((), ()))
        return text.removeprefix(around.prefix_text).removesuffix(around.suffix_text), text

    def role_text(self, role: str, *, is_begin: bool, messages: list[dict[str, Any]]) -> str:
        around = self._role(role)
        return around.prefix_text if is_begin else around.suffix_text

    def tool_format(self) -> ToolFormat:
        return ToolFormat(self._template.tools)

    def _role(self, role: str) -> RoleTemplate:
        roles = self._template.roles
        around = roles.get(role)
        if around is None:
            name = self._client.welcome.model
            if not roles:
                raise Unsupported(
                    f"role {role!r}: the chat template of {name} cannot be split into roles (or there is none); "
                    "write its markers as text, or load the model with another template"
                )
            raise InvalidRequest(f"role {role!r}: the chat template of {name} has {', '.join(sorted(roles))}")
        return around

    # -- sending ------------------------------------------------------------------------------------------------------

    def ship(self, nodes: list[Node], *, is_awaited: bool = False) -> None:
        if self._error is not None and self.closed.is_done:  # the engine refused the program or is gone
            self._fail_unsent(nodes, self._error)
            return
        try:
            found, leaves = self._lower(nodes)
        except PhloemError as error:
            self._give_up(error, [node.leaf for node in nodes if isinstance(node, AskingNode)])
            return
        settings, self._settings = self._settings, None  # sent with the first submit
        try:
            self._call.submit(found, settings)
        except PhloemError as error:
            self._give_up(error, leaves)

    def _give_up(self, error: PhloemError, leaves: list[Leaf]) -> None:
        """Fail ``leaves``, which could not be sent, and cancel what was sent before."""
        self._error = self._error or error
        for leaf in leaves:
            leaf.fail(error)
        self._call.cancel()
        self.closed.resolve((), {})

    def _fail_unsent(self, nodes: list[Node], cause: PhloemError) -> None:
        for node in nodes:
            if isinstance(node, AskingNode):
                error = DependencyFailed(f"the program ended before this: {cause}")
                error.__cause__ = cause
                node.leaf.fail(error)

    def _lower(self, nodes: list[Node]) -> tuple[list[ops.AnyOp], list[Leaf]]:
        """The ops in order, adjacent texts of a sequence joined, and the leaves that they resolve."""
        found: list[ops.AnyOp] = []
        leaves: list[Leaf] = []
        texts: dict[int, list[str]] = {}
        op = self._next_op

        def settle(seq: int) -> None:
            nonlocal op
            parts = texts.pop(seq, None)
            if parts is not None:
                found.append(ops.Text(op=op, seq=seq, text="".join(parts)))
                op += 1

        for node in nodes:
            gap = "" if isinstance(node, MarkNode) else self._gaps.pop(node.seq, "")
            if gap and isinstance(node, TextNode | PasteNode):
                texts.setdefault(node.seq, []).append(gap)
            if isinstance(node, RoleNode) and node.is_begin and (gap := self._template.roles[node.role].gap):
                self._gaps[node.seq] = gap
            if isinstance(node, TextNode):
                texts.setdefault(node.seq, []).append(node.text)
            elif isinstance(node, PasteNode) and node.source.is_done and node.source.error is None:
                texts.setdefault(node.seq, []).append(node.source.texts[node.index])
            else:
                settle(node.seq)
                if isinstance(node, JoinNode):
                    for child in node.children:
                        settle(child)
                if (made := self._op_of(op, node, leaves)) is not None:
                    found.append(made)
                    op += 1
        for seq in list(texts):
            settle(seq)
        self._next_op = op
        return found, leaves

    def _ask(self, op: int, leaf: Leaf, leaves: list[Leaf]) -> None:
        """``op`` will resolve ``leaf``."""
        leaf.op = op
        self._leaves[op] = leaf
        leaves.append(leaf)

    def _op_of(self, op: int, node: Node, leaves: list[Leaf]) -> ops.AnyOp | None:
        """None for a role marker without tokens."""
        seq = node.seq
        match node:
            case GenNode(gen=gen):
                params, grammar = merge_sampling(node.defaults, gen.overrides), gen.grammar
                if gen.ending is not None:
                    grammar, ends = gen.free_ended()
                    params = msgspec.structs.replace(params, stop_regex=(*params.stop_regex, *ends))
                self._ask(op, node.leaf, leaves)
                return ops.Gen(op=op, seq=seq, params=params, grammar=grammar, n=node.n, stream=node.stream)
            case RoleNode():
                around = self._template.roles[node.role]
                ids = around.prefix if node.is_begin else around.suffix
                return ops.Special(op=op, seq=seq, ids=ids) if ids else None
            case SelectNode():
                self._ask(op, node.leaf, leaves)
                method = node.method.wire_name or "token_length_normalized"
                return ops.Select(op=op, seq=seq, choices=node.choices, method=method, append=node.append)
            case PasteNode():
                return ops.Ref(op=op, seq=seq, source=node.source.op, index=node.index)
            case DefaultSystemNode():
                return ops.Special(op=op, seq=seq, ids=self._template.default_system)
            case ForkNode():
                return ops.Fork(op=op, seq=seq, children=node.children)
            case JoinNode():
                return ops.Join(op=op, seq=seq, children=node.children, mode=node.mode)
            case ImageNode():
                welcome = self._client.welcome
                if "image" not in welcome.capabilities:
                    raise Unsupported(f"image(...): {welcome.model} takes no images; give it text, or another model")
                return ops.Image(op=op, seq=seq, hash=node.hash, data=node.data)
            case PinNode():
                self._ask(op, node.leaf, leaves)
                return ops.Pin(op=op, seq=seq, ttl_s=node.ttl_s)
            case MarkNode():
                node.mark.op = op
                return ops.Mark(op=op, seq=seq)
            case RollbackNode():
                return ops.Rollback(op=op, seq=seq, to=node.mark.op)
            case TokensNode():
                return ops.Special(op=op, seq=seq, ids=node.ids)
            case TextSinceNode():
                self._ask(op, node.leaf, leaves)
                return ops.Mark(op=op, seq=seq, begin=node.mark.op)
            case CloseNode():
                return ops.Close(op=op, seq=seq)
        raise AssertionError(node)

    def cancel(self, leaf: Leaf | None = None) -> None:
        if leaf is not None and leaf.op < 0:  # not sent yet
            leaf.fail(Cancelled("cancelled by the program"))
            return
        self._call.cancel(op=None if leaf is None else leaf.op)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _on_event(self, event: ProgramEvent) -> None:
        """On the client's thread."""
        match event:
            case Done():
                leaf = self._leaves.get(event.op)
                if leaf is None:
                    return
                value = event.value
                texts = value if isinstance(value, list | tuple) else (value,)
                leaf.resolve(texts, event.meta)
            case Delta():
                if event.index == 0 and event.text:
                    self._leaves[event.op].push(event.text)
            case OpFailed():
                self._error = self._error or event.error
                leaf = self._leaves.get(event.op)
                if leaf is not None:
                    leaf.fail(event.error, event.partial)
            case SubmitRefused():
                error = from_info(msgspec.structs.replace(event.error.info(), message=self._named(event.error.message)))
                self._error = self._error or error
                for op in event.ops:
                    if (leaf := self._leaves.get(op)) is not None:
                        leaf.fail(error)
                if self._call.is_over:
                    self.closed.resolve((), {})
                self._call.cancel()  # earlier submits of the program still run
            case Closed():
                self.closed.resolve((), msgspec.structs.asdict(event.stats))

    def _named(self, message: str) -> str:
        """``message`` with the program's variable names instead of op numbers."""

        def name_of(found: re.Match[str]) -> str:
            leaf = self._leaves.get(int(found[1]))
            return found[0] if leaf is None else f"{found[2].lower()}({leaf.name!r})"

        return re.sub(r"op (\d+) \((Gen|Select) on sequence \d+\)", name_of, message)
