"""Progress bars: drawn while a model is fetched or loaded, and at no other time."""

import pytest
from phloem.progress import progress_bars


def test_progress_is_drawn_only_where_something_is_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars():
        pass
    assert capsys.readouterr().err == ""
    with progress_bars() as progress:
        progress("waiting", 0, 0)
        progress("toy", 5, 10)
    assert "toy" in capsys.readouterr().err
