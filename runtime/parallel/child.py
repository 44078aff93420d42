"""Python processes that find the same packages as this one."""

import os
import sys


def module_program(module: str) -> str:
    """Code for ``python -P -c`` that calls ``run()`` of ``module`` with this process's module path. Parts of torch are
    imported late.
    """
    path = [os.path.abspath(entry) for entry in sys.path]
    package, _, name = module.rpartition(".")
    late = "from phloem.late_import import import_late; import_late()"
    return f"import sys; sys.path[:] = {path!r}; {late}; from {package} import {name}; {name}.run()"
