"""The settings that programs written for SGLang reach for: one object, ``global_config``. Reads no environment."""

from typing import Any


class GlobalConfig:
    """``default_backend`` is what ``set_default_backend`` sets; ``verbosity`` 2 logs each finished program's text."""

    def __init__(self) -> None:
        self.verbosity = 0
        self.default_backend: Any = None
        self.skip_special_tokens_in_output = True
        self.spaces_between_special_tokens_in_out = True
        self.enable_precache_with_tracing = True
        self.enable_parallel_encoding = True


global_config = GlobalConfig()
