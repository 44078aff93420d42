"""The comparison with other engines: peers behind pipes answer, and bars are judged by the right numbers."""

import asyncio
import sys
from pathlib import Path

import pytest
from phloem.benchmarks import vs_peers
from phloem.benchmarks.serving import Figures

PEERS = Path(vs_peers.__file__).parent / "peers"
ECHO = (
    f"import sys; sys.path.insert(0, {str(PEERS)!r})"
    + """
from lines import read_requests, take_stdout
say, incoming = take_stdout(), read_requests()
say({"ready": "echo 1"})
print("what a library prints")
while (item := incoming.get()) is not None:
    _, asked = item
    if asked["schema"]:
        say({"id": asked["id"], "error": "no grammars"})
        continue
    text = asked["messages"][-1]["content"]
    say({"id": asked["id"], "text": text, "prompt_tokens": 3, "completion_tokens": asked["max_tokens"],
         "first_s": 0.1, "last_s": 0.2})
"""
)


def figures(workload: str, wall_s: list[float], *, ttft: float = 1.0, valid: int | None = None) -> dict[str, object]:
    return {
        "workload": workload,
        "wall_s": wall_s,
        "requests": 32,
        "output_tokens": 128,
        "ttft_p50_ms": ttft,
        "valid": valid,
    }


def test_a_piped_peer_answers_a_workload_and_says_its_name():
    found, name = asyncio.run(vs_peers.ask_pipe([sys.executable, "-c", ECHO], "concurrent", 3))
    assert name == "echo 1"
    assert (found.requests, found.output_tokens, found.prompt_tokens) == (3, 3 * 128, 9)
    assert found.ttft_p50_ms == pytest.approx(100)


def test_a_peers_error_ends_the_benchmark_by_name():
    with pytest.raises(vs_peers.PeerFailed, match="echo 1: no grammars"):
        asyncio.run(vs_peers.ask_pipe([sys.executable, "-c", ECHO], "json-schema", 1))


def test_a_peer_that_ends_fails_its_requests_and_later_ones_at_once():
    ends = ECHO.replace("_, asked = item", "break")

    async def ask_twice():
        faults = []
        async with vs_peers.piped([sys.executable, "-c", ends]) as peer:
            for _ in range(2):
                try:
                    await peer.request("hello", 1, to_the_end=True)
                except vs_peers.PeerFailed as fault:
                    faults.append(str(fault))
        return faults

    assert asyncio.run(ask_twice()) == ["echo 1 ended in the middle of its work", "echo 1 is not running"]


def test_bars_are_judged_by_the_median_and_by_validity():
    results = {
        "single": {
            "phloem": figures("single", [1.0, 9.0, 1.1]),
            "llama.cpp": figures("single", [1.2, 1.2, 1.2]),
        },
        "json-schema": {
            "phloem": figures("json-schema", [1.0], valid=31),
            "openvino": figures("json-schema", [9.0], valid=32),
        },
        "chats": {
            "phloem": figures("chats", [1.0], ttft=0.5),
            "llama.cpp": figures("chats", [2.0], ttft=1.0),
        },
    }
    lines = {
        line.split("  ")[0]: line.split()[-1]
        for line in vs_peers.table("smollm2", "avx512_vnni", results)
        if ":" in line
    }
    assert lines["single: speed over llama.cpp's"] == "holds"
    assert lines["json-schema: speed over openvino's"] == "MISSED"
    assert lines["chats: speed over llama.cpp's"] == "holds"
    assert lines["chats: time to first token over llama.cpp's"] == "MISSED"
    assert lines["concurrent: speed over openvino's"] == "measured"  # not measured


def test_repeats_are_joined_by_their_medians():
    runs = [
        Figures("single", 1, 1, [rate], [1 / rate], ttft_p50_ms=ttft) for rate, ttft in ((4.0, 9), (2.0, 5), (3.0, 7))
    ]
    both = vs_peers.joined(runs)
    assert (both.tokens_per_s, both.ttft_p50_ms) == ([4.0, 2.0, 3.0], 7)


def test_an_unknown_peer_is_named(capsys):
    with pytest.raises(SystemExit):
        vs_peers.main(["--peers", "phloem,vllm"])
    assert "--peers: 'vllm' is not one of: phloem, llama.cpp, openvino, transformers" in capsys.readouterr().err
