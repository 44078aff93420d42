"""Every error a user can meet, as one tree, and how it travels.

PhloemError
├── InvalidRequest          the request cannot be served as written
│   ├── InvalidParams       a sampling parameter is out of its range
│   ├── InvalidGrammar      a schema, regex or grammar cannot be compiled
│   ├── PromptTooLong       more tokens than the context holds
│   ├── LimitExceeded       more ops, bytes, sequences or candidates than a limit allows
│   ├── UnknownModel        no such model, file or alias
│   └── Unsupported         named, understood, and not served by this model or build
├── Overloaded              the queue is full; try again later
├── Cancelled               ended by the client
├── DeadlineExceeded        ended by the program's deadline
├── DependencyFailed        an op this one needs has failed
├── EngineLost              the engine process ended or fell silent
├── ProtocolError           a frame that is not of the protocol
└── InternalError           a bug of Phloem
"""

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
    pass


class InvalidParams(InvalidRequest):
    pass


class InvalidGrammar(InvalidRequest):
    pass


class PromptTooLong(InvalidRequest):
    pass


class LimitExceeded(InvalidRequest):
    pass


class UnknownModel(InvalidRequest):
    pass


class Unsupported(InvalidRequest):
    pass


class Overloaded(PhloemError):
    """``retry_after_s``: when the queue has probably drained; 0 where that is not known."""

    def __init__(self, message: str, *, where: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, where=where)
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return msgspec.structs.replace(super().info(), retry_after_s=self.retry_after_s)


class Cancelled(PhloemError):
    pass


class DeadlineExceeded(PhloemError):
    pass


class DependencyFailed(PhloemError):
    pass


class EngineLost(PhloemError, ConnectionError):
    pass


class ProtocolError(PhloemError):
    pass


class InternalError(PhloemError):
    pass


def _tree(root: type[PhloemError]) -> dict[str, type[PhloemError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def from_info(info: ErrorInfo) -> PhloemError:
    """The exception that ``info`` describes; an unknown kind becomes a plain ``PhloemError``."""
    kind = _tree(PhloemError).get(info.kind, PhloemError)
    if issubclass(kind, Overloaded):
        return kind(info.message, where=info.where, retry_after_s=info.retry_after_s)
    return kind(info.message, where=info.where)
