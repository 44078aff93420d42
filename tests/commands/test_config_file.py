"""``phloem serve --config``: settings from a file, by their flags' names."""

from pathlib import Path

import phloem
import pytest
from phloem import cli
from phloem.commands.config_file import config_text, parse_with_file, read_config
from phloem.protocol.errors import InvalidRequest

TEXT = """
model = "oak"
port = 9000
max-running = 8
prefix-cache = false
no-page = true
step-timeout-s = 7.5
precision = "int4"
cors-origin = ["http://a", "http://b"]
key-file = "keys.toml"
adapter = { poet = "adapters/poet" }
[tenant-weights]
garden = 2
"a=b" = 0.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "serve.toml").write_text(TEXT)
    return tmp_path / "serve.toml"


def parsed(file: Path, *flags: str):
    parser = cli.command_parser()
    argv = ["serve", "--config", str(file), *flags]
    return parse_with_file(parser, parser.parse_args(argv).command, argv, file)


def test_a_file_sets_what_the_flags_would(file: Path) -> None:
    parser = cli.command_parser()
    wanted = parser.parse_args(
        [
            *("serve", "oak", "--port", "9000", "--max-running", "8", "--no-prefix-cache", "--no-page"),
            *(
                "--step-timeout-s",
                "7.5",
                "--precision",
                "int4",
                "--cors-origin",
                "http://a",
                "--cors-origin",
                "http://b",
            ),
            *("--key-file", "keys.toml", "--adapter", "poet=adapters/poet", "--tenant-weights", "garden=2,a=b=0.5"),
        ]
    )
    found = vars(parsed(file))
    different = {name for name, value in vars(wanted).items() if found[name] != value}
    assert different == {"config", "command"}


def test_a_flag_wins_over_the_file_also_with_the_default_value(file: Path) -> None:
    found = parsed(
        file, "--port", "8000", "elm", "--cors-origin", "http://c", "--adapter", "poet=other", "--prefix-cache"
    )
    assert (found.port, found.model, found.cors_origin) == (8000, "elm", ["http://c"])
    assert (found.adapters, found.prefix_cache, found.max_running) == ({"poet": "other"}, True, 8)


def test_what_is_printed_is_a_file_that_sets_the_same(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--config", str(file), "--api-key", "secret", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "secret" not in shown and "# api-key is set\n" in shown and 'model = "oak"\n' in shown
    (tmp_path / "again.toml").write_text(shown)
    first, again = vars(parsed(file)), vars(parsed(tmp_path / "again.toml"))
    assert {name for name, value in first.items() if again[name] != value} == {"config", "command"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-runing = 8", "'max-runing' is not a flag of phloem serve; did you mean max-running?"),
        ("max_running = 8", "'max_running' is not a flag of phloem serve; did you mean max-running?"),
        ("config = 'x'", "'config' is not a flag of phloem serve; "),
        ("port = 99999", "port: 99999 is not a port; ports are 0 to 65535"),
        ("port = true", "port: True is not a "),
        ("prefix-cache = 1", "prefix-cache: 1 is not true or false"),
        ("precision = 'int3'", "precision: 'int3' is not one of auto, "),
        ("cors-origin = [1]", "cors-origin: [1] is not a list of texts"),
        ("adapter = 'x'", "adapter: 'x' is not a table, for example { name = ... }"),
        ("tenant-weights = { a = 'b' }", "tenant-weights: 'b' is not a number"),
        ("adapter = { a = 'b' }\nadapters = { a = 'b' }", "'adapters' is given twice, under two names; give it once"),
        ("port = = 1", "Invalid value (at line 1, column 8)"),
    ],
)
def test_a_wrong_file_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (file := tmp_path / "serve.toml").write_text(text)
    assert cli.main(["serve", "oak", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"phloem: error: {file}: {message}") and said.count("\n") == 1


def test_yaml_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    command = cli.command_parser().parse_args(["serve"]).command
    with pytest.raises(InvalidRequest, match=r"serve.yaml: YAML is not read; write it as TOML"):
        read_config(tmp_path / "serve.yaml", command)
    with pytest.raises(InvalidRequest, match=r"serve.toml: No such file or directory"):
        read_config(tmp_path / "serve.toml", command)


def test_a_server_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == 2
    assert capsys.readouterr().err.startswith("phloem: error: serve what? phloem serve MODEL, or model = ")


def test_texts_are_quoted_as_toml_reads_them(tmp_path: Path) -> None:
    parser = cli.command_parser()
    args = parser.parse_args(["serve", 'a"b\\é', "--tenant-weights", "x y=2"])
    (file := tmp_path / "serve.toml").write_text(config_text(args.command, args))
    found = read_config(file, args.command)
    assert (found["model"], found["tenant_weights"]) == ('a"b\\é', {"x y": 2.0})


def test_the_file_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = (Path(phloem.__file__).parent / "docs" / "cli.md").read_text()
    (file := tmp_path / "serve.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    found = parsed(file)
    assert (found.model, found.replicas, found.tenant_weights) == ("smollm2", 2, {"garden": 2.0})
