import json
from pathlib import Path

import pytest
from phloem.benchmarks.constrained import bench_cases
from phloem.benchmarks.random_texts import walk_schemas
from phloem.constrained import Vocabulary


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokens = [bytes([b]) for b in range(256)] + [b'{"', b'":', b"</s>"]
    return Vocabulary(tokens, {len(tokens) - 1}, len(tokens) - 1)


def test_the_schemas_of_a_folder_are_walked_and_each_text_is_judged(
    vocabulary: Vocabulary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jsonschema")
    (tmp_path / "b").mkdir()
    one = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    (tmp_path / "b" / "one.json").write_text(json.dumps(one))
    (tmp_path / "outside.json").write_text('{"$ref": "other.json"}')
    cases = [(name, text) for name, _, text, _ in bench_cases(tmp_path, 10)]
    assert [name for name, _ in cases] == ["one", "outside"]
    found = walk_schemas(vocabulary, cases, 7, "any")
    assert (found["schemas"], found["schemas refused"], found["walks"], found["valid"]) == (1, 1, 7, 7)
    assert 0 < found["mask_ms"]["p50"] <= found["mask_ms"]["max"] and found["compile_ms"]["max"] > 0
    assert "outside: refused" in capsys.readouterr().out
