"""Every error a user can meet, as one tree of exceptions below ``PhloemError``, and how it travels."""

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as data. ``kind`` is the name of a class below; ``where`` points into the request.

    ``retry_after_s``: of ``Overloaded``, when to try again; 0 where that is not known.
    """

    kind: str
    message: str
    where: str = ""
    retry_after_s: float = 0.0


class PhloemError(Exception):
    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where

    def info(self) -> ErrorInfo:
        return ErrorInfo(kind=type(self).__name__, message=self.message, where=self.where)


class InvalidRequest(PhloemError, ValueError):
    """The request cannot be served as written."""


class InvalidParams(InvalidRequest):
    """A parameter is out of its range."""


class InvalidGrammar(InvalidRequest):
    """A schema, regex or grammar cannot be compiled."""


class PromptTooLong(InvalidRequest):
    """More tokens than the context holds."""


class LimitExceeded(InvalidRequest):
    """More ops, bytes, sequences or candidates than a limit allows."""


class UnknownModel(InvalidRequest):
    """No such model, file or alias."""


class Unsupported(InvalidRequest):
    """Named, understood, and not served by this model or build."""


class Overloaded(PhloemError):
    """The queue is full. ``retry_after_s``: when it has probably drained; 0 where that is not known."""

    def __init__(self, message: str, *, where: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, where=where)
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return msgspec.structs.replace(super().info(), retry_after_s=self.retry_after_s)


class RateLimited(Overloaded):
    """A limit of the key that sent the request is reached. ``retry_after_s``: when the request fits again."""


class Cancelled(PhloemError):
    """Ended by the client."""


class DeadlineExceeded(PhloemError):
    """Ended by the program's deadline."""


class DependencyFailed(PhloemError):
    """An op that this one needs has failed."""


class EngineLost(PhloemError, ConnectionError):
    """The engine's process ended or fell silent."""


class ProtocolError(PhloemError):
    """A frame that does not follow the protocol."""


class InternalError(PhloemError):
    """A bug of Phloem."""


def kinds_of(root: type[PhloemError]) -> dict[str, type[PhloemError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(kinds_of(child))
    return found


def from_info(info: ErrorInfo) -> PhloemError:
    """The exception that ``info`` describes; an unknown kind becomes a plain ``PhloemError``."""
    kind = kinds_of(PhloemError).get(info.kind, PhloemError)
    if issubclass(kind, Overloaded):
        return kind(info.message, where=info.where, retry_after_s=info.retry_after_s)
    return kind(info.message, where=info.where)
