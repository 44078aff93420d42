"""A module that is imported late runs at the first use of one of its names."""

import subprocess
import sys

import pytest
import torch
from phloem.late_import import LateImport, late_names


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


def test_late_modules_work_once_they_are_asked_for():
    code = """
import sys
from phloem.late_import import import_late
import_late()
import torch, numba
assert "activate_meta" not in vars(sys.modules["torch._meta_registrations"])
assert torch.linalg.qr(torch.eye(3)).R.shape == (3, 3)
late = [name for name in sys.argv[1:] if "__getattr__" in vars(sys.modules[name])]
assert late == sys.argv[1:], late
torch._meta_registrations.activate_meta
assert torch.linalg.cholesky(torch.empty(3, 3, device="meta")).shape == (3, 3)
assert torch.distributions.Normal(0.0, 1.0).mean == 0 and torch.optim.SGD and torch.utils.data.DataLoader
with torch.profiler.profile() as profile:
    torch.ones(3).sum()
assert "aten::sum" in {event.name for event in profile.events()} and torch.nn.quantized.Linear
assert torch.fx.symbolic_trace(torch.nn.Linear(2, 2)).graph and torch.fx.passes.shape_prop.ShapeProp
import unittest.mock, yaml
assert unittest.mock.Mock()() is not None and yaml.safe_load("a: 1") == {"a": 1} and numba.experimental.jitclass
assert sys.modules["torchgen.model"].FunctionSchema
print("right")
"""
    path = f"import sys; sys.path[:] = {sys.path!r}\n"
    command = [sys.executable, "-c", path + code, *sorted(late_names(torch.__version__))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
