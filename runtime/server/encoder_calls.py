"""What a request asks of an encoder's engine: its tokens count for the tenant, and it ends with its client."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from fastapi import Request

from ...protocol.messages import Embedded, ProgramStats
from ...protocol.ops import AnyOp, Special, Text
from .service import Service, unless_disconnected
from .tenants import Account, sender_of_request


async def ask_encoder(
    service: Service, http: Request, inputs: Sequence[str | list[int]], ask: Callable[[], Future[Embedded]]
) -> Embedded:
    """The answer to ``ask``, which sends ``inputs``. Raises Cancelled where the client leaves before it comes."""
    account, num_tokens = _account_of(service), 0
    reserved = account.reserve([_as_op(given) for given in inputs], service.client.welcome.context_len)
    try:
        found = await unless_disconnected(asyncio.wrap_future(await asyncio.to_thread(ask)), http.receive)
        num_tokens = sum(found.num_tokens)
    finally:
        account.settle(reserved, ProgramStats(prompt_tokens=num_tokens))
    service.metrics.count_prompt(num_tokens)
    return found


def _account_of(service: Service) -> Account:
    """Of the caller, who may use the model."""
    sender = sender_of_request()
    assert sender is not None  # the gate has named it
    if sender.account.name:
        sender.account.check_model(service.model_name)
    return sender.account


def _as_op(given: str | list[int]) -> AnyOp:
    """For the estimate of its tokens."""
    return Text(op=0, seq=0, text=given) if isinstance(given, str) else Special(op=0, seq=0, ids=tuple(given))
