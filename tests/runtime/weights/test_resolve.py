"""The names a model may have, and the errors for other names."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from phloem.protocol.errors import UnknownModel
from phloem.runtime.weights import resolve_model
from phloem.runtime.weights.aliases import ALIASES
from phloem.runtime.weights.hub import is_hub_name


@pytest.fixture
def pulled(tmp_path: Path) -> Path:
    """A home in which smollm2 seems to be pulled: a file of its size, all holes."""
    alias = ALIASES["smollm2"]
    path = tmp_path / "home" / "models" / alias.name / alias.file_name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(alias.size_bytes)
    return tmp_path / "home"


def test_an_alias_is_the_pulled_file(pulled: Path) -> None:
    assert resolve_model("smollm2", home=pulled) == resolve_model("SmolLM2", home=pulled)
    assert resolve_model("smollm2", home=pulled).is_relative_to(pulled)


def test_paths_are_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert resolve_model(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_path_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert resolve_model("~/m.gguf") == tmp_path / "m.gguf"


def test_a_path_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"holds no config\.json and no \.gguf file"):
        resolve_model(str(tmp_path))
    for name in ("a.gguf", "b.gguf", "c.bin"):
        (tmp_path / name).touch()
    with pytest.raises(UnknownModel, match=r"2 \.gguf files; give one of .*a\.gguf, .*b\.gguf"):
        resolve_model(str(tmp_path))
    with pytest.raises(UnknownModel, match=r"c\.bin is not a \.gguf file; for safetensors give the folder"):
        resolve_model(str(tmp_path / "c.bin"))


@pytest.mark.parametrize("name", ["nope", "", "/no/such/model", "./x.gguf", "a/b.gguf", "a/b/c"])
def test_an_unknown_model_lists_what_may_be_given(name: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve_model(name)
    for hint in (repr(name), "smollm2", "qwen2.5-coder-1.5b", ".gguf file", "config.json", "org/name"):
        assert hint in str(caught.value)


def test_a_near_miss_is_guessed() -> None:
    with pytest.raises(UnknownModel, match="did you mean 'smollm2'"):
        resolve_model("smol-lm2")


@pytest.mark.parametrize(
    ("name", "holds"),
    [("Qwen/Qwen3-0.6B", True), ("a/b@main", True), ("a/b:q4.gguf", True), ("a/b:q4.bin", False), ("a", False)],
)
def test_hub_names(name: str, holds: bool) -> None:
    assert is_hub_name(name) is holds


class Hub:
    """A hub that answers with a folder, or with an error."""

    def __init__(self, folder: Path, *files: str, error: Exception | None = None) -> None:
        self.folder, self.error = folder, error
        self.asked: dict[str, Any] = {}
        for file in files:
            (folder / file).touch()

    def __call__(self, repo: str, **options: Any) -> str:
        self.asked = {"repo": repo, **options}
        if self.error is not None:
            raise self.error
        return str(self.folder)


def test_a_hub_name_is_fetched_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path, "model.safetensors", "config.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_model("Qwen/Qwen3-0.6B@main") == tmp_path
    assert (hub.asked["repo"], hub.asked["revision"]) == ("Qwen/Qwen3-0.6B", "main")


def test_one_gguf_file_of_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path, "q4.gguf")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_model("a/b:q4.gguf") == tmp_path / "q4.gguf"
    assert hub.asked["allow_patterns"] == ["q4.gguf"]
    with pytest.raises(UnknownModel, match=r"a/b on the Hugging Face hub has no file 'q5\.gguf'"):
        resolve_model("a/b:q5.gguf")
    with pytest.raises(UnknownModel, match=r"no safetensors; for a GGUF file give a/b:FILE\.gguf"):
        resolve_model("a/b")


def http_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    found = kind.__new__(kind)
    Exception.__init__(found, "the hub's own words\nand more")
    return found


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("cannot reach"), r"a/b could not be fetched .*cannot reach.*check the network"),
        (ConnectionError("no route"), r"a/b could not be fetched .*ConnectionError: no route"),
        (http_error(errors.RepositoryNotFoundError), r"the Hugging Face hub has no model 'a/b'"),
        (http_error(errors.GatedRepoError), r"a/b on the Hugging Face hub is gated: accept its licence"),
        (http_error(errors.RevisionNotFoundError), r"the Hugging Face hub has no 'a/b': the hub's own words$"),
    ],
)
def test_why_the_hub_gives_nothing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, error=error))
    with pytest.raises(UnknownModel, match=message):
        resolve_model("a/b")
