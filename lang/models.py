"""``Models``: backends by name, of which a run names one, or a rule that chooses.

``prog.run(..., backend=models["large"])`` runs on that model; ``backend=models["auto"]`` where the rule says. Every
operation of a run goes to one model. Where a rule has a check, a run on the cheap model that fails it is run again,
from its first operation, on the strong one; the body is then called twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..protocol.errors import InvalidRequest, PromptTooLong, Unsupported
from ..protocol.messages import ProgramSettings
from ..protocol.model_rules import AnswerCheck, ModelRule, Probe, Reason, RuleCounts, Savings, check_rules
from .backend.base_backend import BaseBackend
from .backend.resolve import as_backend
from .chat_template import ChatTemplate
from .function import SglFunction
from .nodes import GenNode, Leading
from .select import select
from .session import RunTerms, Session
from .state import ProgramState
from .types import ParseError
from .values import Leaf

# How a run of the cheap model fails its check without being asked: its text has no value, or does not fit.
_FAILS_CHECK = (ParseError, PromptTooLong)


class Models:
    """``models``: a Runtime, an Engine, a connection or a backend by name; whoever made them closes them.

    ``rules``: by names that no model has. The prompt of a run, which a rule measures and asks about, is the texts among
    the arguments of its program. Raises InvalidRequest for a rule that cannot work.
    """

    def __init__(self, models: Mapping[str, Any], rules: Mapping[str, ModelRule] | None = None) -> None:
        self._backends = {name: as_backend(target) for name, target in models.items()}
        self._rules = dict(rules or {})
        check_rules(self._rules, self._backends)
        for name, rule in self._rules.items():
            check = rule.when.check
            for field in ("regex", "json_schema"):
                if check is not None and getattr(check, field) is not None:
                    text = f"rule {name!r}, when.check.{field}: it is for answers over HTTP; of a program, use holds="
                    raise Unsupported(f"{text}, a function of its state", where="rules")
        self._savings = Savings(self._rules)

    def __getitem__(self, name: str) -> BaseBackend:
        """The backend of a model or a rule."""
        if (rule := self._rules.get(name)) is not None:
            return _RoutedBackend(name, rule, self._backends[rule.cheap], self._backends[rule.strong], self._savings)
        if (backend := self._backends.get(name)) is not None:
            return _NamedBackend(name, backend, self._savings)
        raise KeyError(f"{name!r} is none of the models and rules: {', '.join([*self._backends, *self._rules])}")

    def __iter__(self) -> Any:
        return iter((*self._backends, *self._rules))

    def report(self) -> dict[str, RuleCounts]:
        """What each rule has done, and an estimate of what it has saved."""
        return self._savings.report()

    @property
    def endpoint(self) -> BaseBackend:
        """A run names what it runs on. Raises InvalidRequest."""
        names = [*self._backends, *self._rules]
        raise InvalidRequest(f"backend=models: name one of them, backend=models[{names[0]!r}]; there are {names}")


class _Turn:
    """See ``Turn``. ``report``: the model, the rule and its reason, and how many models have run the program."""

    def __init__(
        self, backend: BaseBackend, savings: Savings, *, model: str, rule: str, reason: Reason, tries: int = 1
    ) -> None:
        self.backend = backend
        self.model = model
        self.rule = rule
        self.reason: Reason = reason
        self.tries = tries
        self._savings = savings

    def report(self) -> dict[str, Any]:
        return {"model": self.model, "rule": self.rule, "reason": self.reason, "tries": self.tries}

    def next(self, state: ProgramState) -> _Turn | None:
        """After the body: the turn that runs it again, or None where ``state`` is the answer."""
        closed = state.program.session.closed
        if closed.subscribe(closed.done, lambda: self._count(closed.meta)):
            self._count(closed.meta)
        return None

    async def next_async(self, state: ProgramState) -> _Turn | None:
        return self.next(state)

    def _count(self, stats: Mapping[str, Any] | None) -> None:
        tokens = self._measure(stats)
        if self.rule:
            self._savings.add_answer(self.rule, self.model, self.reason, tokens=tokens)

    def _measure(self, stats: Mapping[str, Any] | None) -> int:
        """The tokens of a run that has ended; they count for the model's speed."""
        stats = stats or {}
        tokens: int = stats.get("generated_tokens", 0)
        if tokens:
            self._savings.add_speed(self.model, tokens=tokens, seconds=stats.get("decode_s", 0.0))
        return tokens


class _CheckedTurn(_Turn):
    """A run of the cheap model; where it fails ``check``, it runs again on ``strong``."""

    def __init__(self, turn: _Turn, check: AnswerCheck, strong: BaseBackend, strong_name: str) -> None:
        super().__init__(turn.backend, turn._savings, model=turn.model, rule=turn.rule, reason=turn.reason)
        self._check = check
        self._strong = strong
        self._strong_name = strong_name

    def next(self, state: ProgramState) -> _Turn | None:
        error = state.error()
        closed = state.program.session.closed
        closed.wait_for(closed.done)
        return self._judge(state, error)

    async def next_async(self, state: ProgramState) -> _Turn | None:
        error = await state.error_async()
        closed = state.program.session.closed
        await closed.wait_for_async(closed.done)
        return self._judge(state, error)

    def _judge(self, state: ProgramState, error: BaseException | None) -> _Turn | None:
        """``state`` has ended."""
        if error is None:
            holds = self._holds(state)
        else:
            holds = not isinstance(error, _FAILS_CHECK)  # other errors are the caller's
        stats = state.program.session.closed.meta
        if holds:
            self._count(stats)
            return None
        self._savings.add_dropped(self.rule, tokens=self._measure(stats))
        return _Turn(
            self._strong, self._savings, model=self._strong_name, rule=self.rule, reason="check", tries=self.tries + 1
        )

    def _holds(self, state: ProgramState) -> bool:
        if self._check.whole and any(_is_cut(node.leaf) for node in state.program.log if isinstance(node, GenNode)):
            return False
        if self._check.holds is None:
            return True
        try:
            holds = self._check.holds(state)
        except _FAILS_CHECK:
            return False
        if inspect.isawaitable(holds):
            if inspect.iscoroutine(holds):
                holds.close()
            text = f"rule {self.rule!r}, when.check.holds is async; the run has ended when it is called"
            raise InvalidRequest(f"{text}, so give a plain function", where="rules")
        return bool(holds)


class _Delegating(BaseBackend):
    """What is no run, such as tracing and caching, is done by ``inner``."""

    def __init__(self, inner: BaseBackend, savings: Savings) -> None:
        self._inner = inner
        self._savings = savings
        self.precache_in_batch = inner.precache_in_batch
        self.support_concate_and_append = inner.support_concate_and_append
        self.is_chat_model = inner.is_chat_model

    @property
    def identity(self) -> Any:
        return self._inner.identity

    def open_session(self, run: RunTerms) -> Session | None:
        return self._inner.open_session(run)

    def check_settings(self, settings: ProgramSettings) -> None:
        self._inner.check_settings(settings)

    def get_model_name(self) -> str:
        return self._inner.get_model_name()

    def get_chat_template(self) -> ChatTemplate:
        return self._inner.get_chat_template()

    def cache_prefix(self, prefix_str: str) -> None:
        self._inner.cache_prefix(prefix_str)

    def cache_nodes(self, nodes: Sequence[Leading]) -> None:
        self._inner.cache_nodes(nodes)

    def pin_nodes(self, nodes: Sequence[Leading], ttl_s: float) -> int | None:
        return self._inner.pin_nodes(nodes, ttl_s)

    def flush_cache(self) -> bool:
        return self._inner.flush_cache()

    def get_server_info(self) -> dict[str, Any] | None:
        return self._inner.get_server_info()


class _NamedBackend(_Delegating):
    """One of the models."""

    def __init__(self, name: str, inner: BaseBackend, savings: Savings) -> None:
        super().__init__(inner, savings)
        self._name = name

    def choose(self, prompt: Sequence[Any], settings: ProgramSettings, *, stream: bool) -> _Turn:
        return _Turn(self._inner, self._savings, model=self._name, rule="", reason="named")


class _RoutedBackend(_Delegating):
    """A rule. Prefixes are cached and pinned on its cheap model."""

    def __init__(self, name: str, rule: ModelRule, cheap: BaseBackend, strong: BaseBackend, savings: Savings) -> None:
        super().__init__(cheap, savings)
        self._name = name
        self._rule = rule
        self._strong = strong
        self.asks_before_run = rule.when.probe is not None

    def choose(self, prompt: Sequence[Any], settings: ProgramSettings, *, stream: bool) -> _Turn:
        when = self._rule.when
        if stream and when.check is not None:
            text = f"stream=True: rule {self._name!r} has a check, which needs the whole answer"
            raise Unsupported(f"{text}; leave out stream=True, or name a model", where="stream")
        texts = list(_texts(prompt))
        reason = when.met(tenant=settings.tenant, prompt_chars=sum(map(len, texts)))
        if reason is None and when.probe is not None and _is_hard(when.probe, "\n".join(texts), self._inner, settings):
            reason = "probe"
        if reason is not None:
            return _Turn(self._strong, self._savings, model=self._rule.strong, rule=self._name, reason=reason)
        turn = _Turn(self._inner, self._savings, model=self._rule.cheap, rule=self._name, reason="cheap")
        return turn if when.check is None else _CheckedTurn(turn, when.check, self._strong, self._rule.strong)


def _texts(value: Any) -> Any:
    """The texts in the arguments of a run."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _probe(s: ProgramState, text: str, choices: tuple[str, str]) -> None:
    s += text
    s += select("answer", choices)


def _is_hard(probe: Probe, prompt: str, cheap: BaseBackend, settings: ProgramSettings) -> bool:
    program = SglFunction(_probe)
    try:
        state = program.run(
            text=probe.text(prompt),
            choices=probe.choices,
            backend=cheap,
            tenant=settings.tenant,
            cache_salt=settings.cache_salt,
            priority=settings.priority,
            deadline_s=settings.deadline_s,
        )
        info = state.get_meta_info("answer")
    except PromptTooLong:
        return True
    return probe.is_hard(info.get("scores") or info["normalized_prompt_logprobs"])


def _is_cut(leaf: Leaf) -> bool:
    """Whether a generation has stopped at its token limit."""
    info = leaf.report()
    if not isinstance(info, Mapping):
        return False
    reasons = [one.get("finish_reason") for one in (info, *info.get("candidates", ()))]
    return any((found.get("type") if isinstance(found, Mapping) else found) == "length" for found in reasons)
