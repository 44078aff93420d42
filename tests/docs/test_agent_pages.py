"""The pages on tools, decoders and healing hold what they show: their code runs, on the real model."""

import re
from pathlib import Path

import phloem
import pytest
from phloem.lang.global_config import global_config

DOCS = Path(phloem.__file__).parent / "docs"
PAGES = [page for page in ("tools", "decoders", "healing") if (DOCS / f"{page}.md").exists()]


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def runtime(smollm2_path):
    with phloem.Runtime(model=str(smollm2_path), num_slots=8192) as runtime:
        yield runtime


@pytest.mark.model
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, runtime, monkeypatch):
    """All blocks of a page are one program; its ``Runtime`` is the test's."""
    monkeypatch.setattr(phloem, "Runtime", lambda **options: runtime, raising=False)
    monkeypatch.setattr(global_config, "default_backend", None)
    source = "\n".join(blocks_of(page))
    assert source
    exec(compile(source, f"docs/{page}.md", "exec"), {"__name__": "page"})
