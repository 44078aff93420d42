"""The flags of the command line: one per field of ``EngineConfig``, and numbers with their bounds."""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Callable, Collection
from typing import Any, Literal

import msgspec

from .runtime.config import EngineConfig

_LOG_LEVELS = ("debug", "info", "warning", "error")

ENGINE_HELP = {
    "adapter_folder": "folder of the adapters that can be loaded while it runs (POST /v1/adapters)",
    "adapters": "a low-rank adapter that requests can name, from a folder in PEFT's format; may be repeated",
    "weights": "random weights need only the model's config and tokenizer, to measure its speed",
    "device": "where to run: cpu, cuda, cuda:1",
    "precision": "auto keeps 4-bit weights 4-bit and takes the fastest form; int16: the same with finer activations",
    "kv_dtype": "type of keys and values; auto follows the precision, int8 on a CPU and fp8 on a GPU are half as large",
    "max_seq_len": "longest sequence in tokens; 0: the model's own limit",
    "num_slots": "tokens whose keys and values fit in memory at once; 0: sized from memory",
    "max_running": "sequences that may run in one step; 0: 64 on a CPU, 256 on a GPU",
    "max_waiting": "sequences that may wait before new ones are refused",
    "max_step_tokens": "tokens that one step computes at most; 0: 512 on a CPU, 8192 on a GPU",
    "prefill_chunk": "tokens of one prompt that one step computes at most; 0: 256 on a CPU, 4096 on a GPU",
    "prefix_cache": "keep computed prefixes and use them again",
    "cached_prompts": "prompts whose prefixes are kept: all, or that of the last sequence alone, to compare",
    "host_cache_bytes": "bytes of host memory for keys and values that no longer fit; 0: none",
    "disk_cache": "folder for keys and values that survive a restart (default: none)",
    "disk_cache_bytes": "bytes that the folder may take",
    "shared_cache": "bucket for keys and values that engines share: s3://BUCKET/PREFIX?endpoint=URL (default: none)",
    "shared_cache_bytes": "bytes that the blocks below the bucket's prefix may take",
    "cache_format": "format of keys and values in host memory and in a store; int8 and fp8 are smaller and rounded",
    "cache_events_url": "tcp://127.0.0.1:PORT or ipc:///PATH where cache events are published",
    "eviction": "which cached prefix is evicted first when memory is short",
    "order": "which waiting sequence runs next",
    "match_window": "among this many waiting sequences, the one with most cached tokens runs next",
    "tenant_weights": "shares of tenants, as NAME=2,OTHER=1; 1 for those not named",
    "jump_forward": "append text that a grammar forces at once instead of decoding it",
    "grammar_engine": "what compiles grammars; llguidance and xgrammar are extras of that name, and never jump forward",
    "speculative": "auto drafts tokens where that is faster; no answer changes",
    "max_draft": "most draft tokens of one sequence in a step",
    "draft_model": "a smaller model that drafts too; self:N is N of the model's layers",
    "draft_adapters": "the draft model's own adapter for texts with that adapter of the model; may be repeated",
    "cuda_graphs": "on a GPU, auto runs steps of up to 2,048 tokens as CUDA graphs",
    "overlap": "on a GPU, auto does the host work of a step while the GPU computes the next",
    "gpu_memory_fraction": "share of a GPU's memory that the engine may take",
    "seed": "sampling seed of requests without one",
    "num_threads": "CPU threads; 0: one per core",
    "cpu_isa": "instruction set of the CPU kernels, to compare; auto is the best that this machine has",
    "repack_cache": "keep a copy of the packed weights in $PHLOEM_HOME/packed, which later starts read",
    "tensor_parallel": "processes that share out every layer of the model",
    "pipeline_parallel": "processes, or groups of tensor-parallel processes, that each have some of the layers",
    "expert_parallel": "parts of the tensor-parallel processes that each have some of a mixture's experts",
    "expert_copies": "experts of other parts that each process copies in every mixture, those that are chosen most",
    "sequence_parallel": "copies of these processes that each keep a part of every sequence's keys and values",
    "nnodes": "machines that have equal parts of the processes of a split model",
    "node_rank": "number of this machine; 0 has the server, the others run the same command with 1, 2, ...",
    "dist_init_addr": "HOST:PORT of machine 0, at which the others meet it",
    "rank_timeout_s": "seconds after which a silent process of a split model counts as lost",
    "client_timeout_s": "seconds after which a silent client's programs are cancelled",
    "log_level": "least severe log messages written to stderr",
}


def add_engine_flags(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """One flag per field of ``EngineConfig``, with its default. ``without``: fields that ``parser`` leaves alone."""
    group = parser.add_argument_group("engine")
    types = typing.get_type_hints(EngineConfig)
    for field in msgspec.structs.fields(EngineConfig):
        if field.name == "model" or field.name in without:
            continue
        kind = types[field.name]
        options: dict[str, Any] = {"default": field.default}
        options["help"] = f"{ENGINE_HELP[field.name]} (default: %(default)s)"
        if field.name == "log_level":
            options["choices"] = _LOG_LEVELS
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        elif kind == dict[str, str]:
            plural = f"--{field.name.replace('_', '-')}"
            metavar, explained = "NAME=PATH", ENGINE_HELP[field.name]
            flags = (plural.removesuffix("s"), plural)
            group.add_argument(*flags, action=_AddNamed, default={}, metavar=metavar, help=explained, dest=field.name)
            continue
        elif typing.get_origin(kind) is dict:
            options |= {"type": _parse_weights, "default": {}, "metavar": "NAME=WEIGHT,..."}
            options["help"] = ENGINE_HELP[field.name]
        else:
            is_share = field.name.endswith("_fraction")
            options["type"] = _parse_share if is_share else _NUMBERS.get(kind, kind)
            options["metavar"] = "SHARE" if is_share else {int: "N", float: "SECONDS"}.get(kind, field.name.upper())
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


class _AddNamed(argparse.Action):
    """NAME=VALUE into a dictionary."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        name, _, path = str(values).partition("=")
        if not name or not path:
            parser.error(f"argument {option_string}: {values!r} is not NAME=PATH, for example poet=adapters/poet")
        found = getattr(namespace, self.dest, {})
        if name in found:
            parser.error(f"argument {option_string}: {name!r} is given twice")
        setattr(namespace, self.dest, {**found, name: path})


def explained(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` for argparse, which shows the message of its own exception only."""

    def parse_or_explain(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_or_explain


def parse_count(text: str) -> int:
    if not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{count} is negative; give 0 or more")
    return count


def _parse_weights(text: str) -> dict[str, float]:
    weights = {}
    for entry in text.split(","):
        name, _, weight = entry.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{entry!r} is not NAME=WEIGHT, for example garden=2") from None
    return weights


def parse_at_least_one(text: str) -> int:
    if (count := parse_count(text)) == 0:
        raise argparse.ArgumentTypeError("0 is too few; give 1 or more")
    return count


def parse_port(text: str) -> int:
    port = parse_count(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{port} is not a port; ports are 0 to 65535")
    return port


def _number(holds: Callable[[float], bool], must_be: str, what: str = "number") -> Callable[[str], float]:
    """A parser of numbers for which ``holds`` is true."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}") from None
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text}: must be {must_be}")
        return value

    return parse


_parse_share = _number(lambda share: 0 < share <= 1, "above 0 and at most 1")
parse_duration = _number(lambda duration: 0 < duration < float("inf"), "above 0, and not inf")
parse_time_limit = _number(lambda limit_s: limit_s > 0, "above 0 seconds; inf: no limit", "number of seconds")
parse_rate = _number(lambda rate: 0 <= rate < float("inf"), "0 (off) or above")
parse_cached_share = _number(lambda share: 0 <= share <= 1, "between 0 and 1")

_NUMBERS: dict[Any, Callable[[str], Any]] = {int: parse_count, float: parse_duration}


def parse_choices(text: str) -> tuple[str, ...]:
    """``a,b`` as two texts. Raises ValueError for an empty or repeated one."""
    choices = tuple(text.split(","))
    if len(choices) < 2 or "" in choices or len(set(choices)) < len(choices):
        raise ValueError(f"{text!r} is not two or more different texts with commas between them, for example yes,no")
    return choices


def parse_pattern(text: str) -> str:
    """Raises ValueError for a text that is no regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text
