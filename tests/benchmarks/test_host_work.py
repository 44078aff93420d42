"""The host's part of a step is measured over a stand-in, with and without grammars."""

import pytest
from phloem.benchmarks import host_work


@pytest.mark.parametrize("grammar", ["", "[a-z]*"])
def test_every_sequence_decodes_in_each_measured_step(grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_work, "STEPS", 3)
    middle, least = host_work.measure(3, grammar=grammar)  # it asserts that all of them still run
    assert 0 < least <= middle
