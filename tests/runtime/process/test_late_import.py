"""A module that is imported late runs at the first use of one of its names."""

import subprocess
import sys

import pytest
from phloem.runtime.process.late_import import LateImport


@pytest.fixture
def late(tmp_path, monkeypatch):
    """The module ``late_sap`` in a path of its own; it counts its runs in ``sys``."""
    (tmp_path / "late_sap.py").write_text(
        "import sys\nsys.late_sap_runs = getattr(sys, 'late_sap_runs', 0) + 1\nrises = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [LateImport(frozenset({"late_sap"})), *sys.meta_path])
    yield
    sys.modules.pop("late_sap", None)
    vars(sys).pop("late_sap_runs", None)


def runs() -> int:
    return getattr(sys, "late_sap_runs", 0)


def test_the_code_runs_once_and_when_a_name_is_asked_for(late):
    import late_sap

    assert not hasattr(late_sap, "__path__") and late_sap.__spec__.name == "late_sap" and runs() == 0
    assert late_sap.rises and runs() == 1
    with pytest.raises(AttributeError, match="falls"):
        _ = late_sap.falls
    from late_sap import rises

    assert rises and runs() == 1


def test_a_name_that_is_imported_from_it_runs_it(late):
    from late_sap import rises

    assert rises and runs() == 1


def test_torch_s_meta_device_works_once_its_module_is_asked_for():
    code = """
import sys
from phloem.runtime.process.late_import import import_late
import_late()
import torch
assert "activate_meta" not in vars(sys.modules["torch._meta_registrations"])
assert torch.linalg.qr(torch.eye(3)).R.shape == (3, 3)
torch._meta_registrations.activate_meta
assert torch.linalg.cholesky(torch.empty(3, 3, device="meta")).shape == (3, 3)
print("right")
"""
    path = f"import sys; sys.path[:] = {sys.path!r}\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
