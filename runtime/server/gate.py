"""The middleware that checks API keys and Host headers and counts responses."""

import secrets
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .faults import Fault
from .metrics import ServerMetrics
from .service import fault_response

OPEN_PATHS = ("/health",)


class Gate:
    """ASGI middleware. ``hosts``: the names by which requests may call this server (empty: any).

    Without a key, a server on loopback answers only to loopback names: a web page that has bound its own name to
    127.0.0.1 (DNS rebinding) gets nothing.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, hosts: Collection[str], metrics: ServerMetrics) -> None:
        self._app = app
        self._token = b"Bearer " + api_key.encode() if api_key else None
        self._hosts = frozenset(hosts)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # without a response, the client has disconnected

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        fault = self._fault(scope)
        self._metrics.in_flight.inc()
        try:
            if fault is not None:
                await fault_response(fault)(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            self._metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.responses.labels(route, str(status)).inc()

    def _fault(self, scope: Scope) -> Fault | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._hosts and name not in self._hosts:
            message = f"this server does not answer to the host name {name!r}; start it with an API key or another host"
            return Fault(403, message, "permission_error", code="host_not_allowed")
        if self._token is None or scope["path"] in OPEN_PATHS:
            return None
        if not secrets.compare_digest(headers.get(b"authorization", b""), self._token):
            message = "missing or wrong API key; send it as 'Authorization: Bearer KEY'"
            return Fault(401, message, "authentication_error", code="invalid_api_key")
        return None
