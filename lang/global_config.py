"""``global_config``: the process-wide settings of programs written for SGLang."""

from typing import Any

from ..protocol.errors import InvalidRequest


class GlobalConfig:
    """Setting any other name raises InvalidRequest.

    ``default_backend``: runs programs that name no backend; ``set_default_backend`` sets it.
    ``verbosity``: at 2 or more, the text of each finished program is logged.
    ``skip_special_tokens_in_output``: False keeps special tokens in generated text, unless a gen or run says otherwise.
    ``enable_precache_with_tracing``: ``run_batch`` has the common beginning of its items computed first.
    ``enable_parallel_encoding``: a join that appends calls ``concatenate_and_append`` of a backend that supports it.
    """

    __slots__ = (
        "default_backend",
        "enable_parallel_encoding",
        "enable_precache_with_tracing",
        "skip_special_tokens_in_output",
        "verbosity",
    )

    def __init__(self) -> None:
        self.default_backend: Any = None
        self.enable_parallel_encoding = True
        self.enable_precache_with_tracing = True
        self.skip_special_tokens_in_output = True
        self.verbosity = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__slots__:
            known = ", ".join(self.__slots__)
            raise InvalidRequest(f"global_config.{name} = {value!r}: there is no such setting; there are {known}")
        object.__setattr__(self, name, value)


global_config = GlobalConfig()
