"""The command ``phloem`` and its sub-commands: their flags, their errors and their exit codes.

Only this module prints; ``commands/`` writes with the functions that it is given. Each command is a call that a program
could make as well.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from . import __version__
from .constrained.spec import GRAMMAR_KINDS
from .flags import (
    add_engine_flags,
    explained,
    parse_at_least_one,
    parse_cached_share,
    parse_choices,
    parse_count,
    parse_duration,
    parse_pattern,
    parse_port,
    parse_rate,
    parse_time_limit,
)
from .progress import Bars, Progress, progress_bars
from .protocol.errors import EngineLost, InvalidRequest, PhloemError, UnknownModel, Unsupported
from .runtime.config import ConnectionLimits, EngineConfig, StoreLimits, choose_cpu_isa
from .runtime.weights.aliases import ALIASES

_MODELS = f"an alias ({', '.join(ALIASES)}), a .gguf file, a folder with config.json, or a Hugging Face name"

_KINDS_BY_SUFFIX = {".json": "json_schema", ".lark": "lark", ".ebnf": "ebnf", ".gbnf": "ebnf", ".regex": "regex"}
_NAMED_MODEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)")
_OK, _LOST, _FAILED, _INTERRUPTED = 0, 1, 2, 130
NVIDIA_DEVICE = Path("/dev/nvidiactl")  # is there on Linux where the driver has a GPU
INFO_TIMEOUT_S = 2.0  # for an engine that is ready to say how it runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user error prints one line on stderr and returns 2.

    A lost engine is 1: the same command may succeed when it is run again.
    """
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        parser = command_parser(words[0] if words else None)
        if not words:
            parser.print_usage(sys.stderr)
        args = parser.parse_args(words)
        if getattr(args, "config", None) is not None:
            from .commands.config_file import parse_with_file

            args = parse_with_file(parser, args.command, words, args.config)
        _set_up_logging(getattr(args, "log_level", "warning"))
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `phloem doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _OK
    except EngineLost as error:
        return _complain(str(error), code=_LOST)
    except PhloemError as error:
        return _complain(str(error))
    except OSError as error:
        if error.filename is not None:
            return _complain(f"{error.filename}: {error.strerror or error}")
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            return _complain(f"{error.strerror or error}; choose another --host or --port")
        raise
    except KeyboardInterrupt:
        return _complain("interrupted", code=_INTERRUPTED)


# -- commands ---------------------------------------------------------------------------------------------------------


def _pull(args: argparse.Namespace) -> int:
    from .runtime.weights.resolve import resolve_model

    with progress_bars() as progress:
        path = resolve_model(args.model, progress=progress)
    print(path)
    return _OK


def _serve(args: argparse.Namespace) -> int:
    if args.print_config:
        from .commands.config_file import config_text

        _write(config_text(args.command, args))
        return _OK
    from .runtime.process.python_process import VARIABLES

    os.environ.update(VARIABLES | os.environ)  # before numpy is imported
    with _first_interpreter(args) as first:
        return _serve_with(args, first)


@contextmanager
def _first_interpreter(args: argparse.Namespace) -> Iterator[Any]:
    """The process of the one model's first engine, which loads libraries while this one does; None where it cannot."""
    if args.on == "ray" or args.node_rank or args.cpu_isa != "auto" or args.model is None or args.models:
        yield None
        return
    from .runtime.process.python_process import LIBRARIES, PythonProcess

    first = PythonProcess(LIBRARIES)
    try:
        yield first
    finally:
        first.discard()


def _serve_node(args: argparse.Namespace) -> int:
    """The ranks of a machine that has no server."""
    from .runtime.parallel.gang import refuse_combinations
    from .runtime.parallel.node import run_node

    config = _resolved_config(args)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    refuse_combinations(config)
    print(f"phloem runs machine {config.node_rank} of {config.nnodes} for {config.dist_init_addr} (Ctrl-C ends it)")
    sys.stdout.flush()
    run_node(config)
    return _OK


def _serve_with(args: argparse.Namespace, first: Any) -> int:
    if args.node_rank and args.on != "ray":
        return _serve_node(args)
    named = _served_models(args)
    from .runtime.server.logs import set_up_logs

    set_up_logs(args.log_format, args.log_requests)
    tls = _tls(args)
    rules = _read_rules(args.rules) if args.rules is not None else {}
    configs = {name: _resolved_config(args, model) for name, model in named.items()}
    (own_name, config), *others = configs.items()
    from .cluster.restarts import RestartPolicy
    from .runtime.server import serve
    from .runtime.server.remote_images import AllowedHosts

    image_hosts = AllowedHosts(args.allow_image_hosts)
    supervise = _supervise(args, first)
    kept_alive: list[Any] = []  # what keeps the engines of each model alive, once they are ready

    def supervise_and_note(*given: Any, **options: Any) -> Any:
        kept_alive.append(supervise(*given, **options))
        return kept_alive[-1]

    def greeting(url: str) -> str:
        how = _how_it_runs(config, _isa_of(kept_alive[0]))
        replicas = f", {args.replicas} replicas" if args.replicas > 1 else ""
        return f"phloem serves {', '.join(named.values())} at {url}, {how}{replicas} (Ctrl-C ends it)"

    with (
        otel_tracer() as tracer,
        _loading_bars(greeting) as (progress, on_ready),
    ):
        return serve(
            config,
            host=args.host,
            port=args.port,
            api_key=_api_key(args),
            key_file=args.key_file,
            max_concurrent=args.max_concurrent,
            tls=tls,
            model_name=own_name,
            others=dict(others),
            rules=rules,
            cors_origins=args.cors_origin,
            replicas=args.replicas,
            supervise=supervise_and_note,
            connections=ConnectionLimits(
                headers_s=args.header_timeout_s,
                body_s=args.body_timeout_s,
                idle_s=args.idle_timeout_s,
                write_s=args.write_timeout_s,
                per_address=args.max_connections_per_address,
            ),
            stored=StoreLimits(
                max_count=args.max_stored_responses,
                max_bytes=args.max_stored_bytes,
                lifetime_s=args.stored_lifetime_s,
            ),
            has_page=not args.no_page,
            tracer=tracer,
            image_hosts=image_hosts,
            policy=RestartPolicy(step_timeout_s=args.step_timeout_s, max_restarts=args.max_restarts),
            on_ready=on_ready,
            progress=progress,
        )


def _served_models(args: argparse.Namespace) -> dict[str, str]:
    """The models of ``phloem serve`` by their names: ``MODEL`` or ``NAME=MODEL``."""
    from .runtime.server.lifetime import name_of

    given = [*([] if args.model is None else [args.model]), *args.models]
    if not given:
        raise InvalidRequest('serve what? phloem serve MODEL, or model = "MODEL" in the file of --config')
    if len(given) > 1:
        for flag, is_given in (("--model-name", args.model_name is not None), ("--on ray", args.on == "ray")):
            if is_given:
                raise InvalidRequest(f"{flag}: it is for one model, but {len(given)} are given; leave it out")
    named: dict[str, str] = {}
    for text in given:
        found = None if os.path.exists(text) else _NAMED_MODEL.fullmatch(text)
        name, model = found.groups() if found else (args.model_name or name_of(text), text)
        if found and args.model_name is not None:
            raise InvalidRequest(f"--model-name {args.model_name}: {text!r} names the model already; give one of them")
        if name in named:
            raise InvalidRequest(f"{name!r} is the name of two models; give each its own, as NAME=MODEL")
        named[name] = model
    return named


def _read_rules(path: Path) -> dict[str, Any]:
    """The file of ``--rules``: a table for each rule."""
    from .protocol.model_rules import ModelRule

    try:
        rules = msgspec.toml.decode(path.read_bytes(), type=dict[str, ModelRule])
    except OSError as error:
        raise InvalidRequest(f"rules {path}: {error.strerror or error}") from None
    except ValueError as error:  # TOML's and msgspec's
        raise InvalidRequest(f"rules {path}: {error}") from None
    if not rules:
        raise InvalidRequest(f"rules {path}: no rules; add a table for each, with cheap, strong and when")
    return rules


def _supervise(args: argparse.Namespace, first: Any) -> Any:
    """What keeps the engines alive. ``first``: the interpreter of the first one."""
    from .cluster.limits import FleetLimits

    limits = FleetLimits(max_rebalanced=args.max_rebalanced)
    if args.on != "ray":
        if args.ray_address:
            raise InvalidRequest(f"--ray-address {args.ray_address}: it is for --on ray; add that or leave it out")
        from .cluster.supervisor import Supervisor

        return partial(Supervisor, roles=tuple(args.role), first=first, limits=limits)
    if args.role:
        raise InvalidRequest(f"--role {args.role[0]}: with --on ray every replica does both; leave it out")
    from .cluster.restarts import RestartPolicy

    if args.max_restarts != RestartPolicy().max_restarts:
        text = f"--max-restarts {args.max_restarts}: with --on ray, Ray Serve decides about restarts; leave it out"
        raise InvalidRequest(text)
    # Ray reads them when it is imported. The second one lets a Ray of this machine alone listen on loopback.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not args.ray_address:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        from .cluster.ray.supervisor import RaySupervisor
    except ImportError as error:
        raise Unsupported(f"--on ray needs Ray ({error}); install it with: pip install 'phloem[ray]'") from error
    return partial(RaySupervisor, address=args.ray_address, limits=limits)


@contextmanager
def otel_tracer() -> Iterator[Any]:
    """Exports spans to where OpenTelemetry's environment variables say; None where they do not."""
    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    if not url and (base := os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        url = f"{base.rstrip('/')}/v1/traces"
    if not url:
        yield None
        return
    from .runtime.server.otel import otlp_tracer

    tracer = otlp_tracer(
        url,
        version=__version__,
        protocol=os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", ""),
    )
    try:
        yield tracer
    finally:
        if tracer is not None:
            tracer.close()


def _tls(args: argparse.Namespace) -> Any:
    """The files of the flags, checked; None without them."""
    if args.tls_cert is None and args.tls_key is None and args.tls_ca is None:
        return None
    if args.tls_cert is None or args.tls_key is None:
        raise InvalidRequest("TLS needs both --tls-cert and --tls-key")
    from .runtime.server.listener import Tls

    return Tls(args.tls_cert, args.tls_key, args.tls_ca)


def _new_key(args: argparse.Namespace) -> int:
    from .runtime.server.tenants import check_name, hash_of, new_key

    check_name(args.name)
    key = new_key()
    print(f"{key}\n")
    print("The key is shown this once. For the key file, where the tenant has no table yet:\n")
    print(f'[tenants."{args.name}"]\nkeys = ["{hash_of(key)}"]')
    return _OK


def _engine(args: argparse.Namespace) -> int:
    config = _resolved_config(args)
    from .runtime.process import run_engine

    how = _how_it_runs(config, _isa_name(config))
    with _loading_bars(lambda url: f"phloem runs {args.model} at {url}, {how}") as (progress, on_ready):
        return run_engine(config, args.url, on_ready=on_ready, progress=progress)


def _chat(args: argparse.Namespace) -> int:
    from .commands.answers import Wanted
    from .commands.chat import TerminalChat, piped_lines, read_schema, terminal_lines
    from .commands.sampling_flags import given_sampling

    schema = None if args.json_schema is None else read_schema(args.json_schema)
    wanted = Wanted(given_sampling(args), json_schema=schema)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with _source(args) as source:
        if is_terminal:
            _write(f"{source.name}; /help lists the commands\n")
        return TerminalChat(
            source,
            terminal_lines() if is_terminal else piped_lines(sys.stdin),
            wanted=wanted,
            system=args.system,
            is_terminal=is_terminal,
            write=_write,
            complain=_complain,
            note=_note,
        ).run()


def _generate(args: argparse.Namespace) -> int:
    from .commands.answers import Wanted
    from .commands.chat import read_schema
    from .commands.generate import generate
    from .commands.sampling_flags import given_sampling

    try:
        schema = None if args.json_schema is None else read_schema(args.json_schema)
        wanted = Wanted(given_sampling(args), json_schema=schema, regex=args.regex, choices=args.choices or ())
        if args.raw and args.system:
            raise InvalidRequest("--system: plain text has no system message; leave out --raw or --system")
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        with _source(args) as source:
            generate(
                source,
                prompt,
                wanted=wanted,
                system=args.system,
                is_raw=args.raw,
                as_json=args.json,
                write=_write,
                note=_note,
            )
    except PhloemError as error:
        return _complain(error.message, code=_LOST)
    return _OK


@contextmanager
def _source(args: argparse.Namespace) -> Iterator[Any]:
    """The model that answers: at ``args.url``, or of an engine that ends with this command."""
    from .commands.answers import DEFAULT, Source, source_at

    if args.url is not None:
        _refuse_engine_flags(args)
        source = source_at(args.url, api_key=_api_key(args), model=args.model)
        try:
            yield source
        finally:
            source.backend.shutdown()
        return
    if args.api_key is not None:
        raise InvalidRequest("--api-key: an engine of this process takes no key; give --url too, or leave it out")
    if args.model in (None, DEFAULT):
        args.model = next(iter(ALIASES))
    config = _resolved_config(args)
    from .engines import Runtime

    with progress_bars("count") as progress:
        runtime = Runtime(config, progress=progress)
    with runtime:
        yield Source(runtime.endpoint, args.model)


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    for name in _changed_engine_flags(args):
        flag = f"--{name.replace('_', '-')}"
        raise InvalidRequest(f"{flag} is of a new engine, but --url names a running one; leave it out")


def _changed_engine_flags(args: argparse.Namespace) -> list[str]:
    """The engine's settings that are not their defaults."""
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    defaults = vars(parser.parse_args([]))
    return [name for name, value in defaults.items() if name != "log_level" and getattr(args, name, value) != value]


def _run(args: argparse.Namespace) -> int:
    from .commands.run_file import run_file

    return run_file(
        args.file,
        args.arguments,
        open_source=lambda: _source(args),
        is_chosen=bool(args.model or args.url or _changed_engine_flags(args)),
        note=_note,
    )


def _ps(args: argparse.Namespace) -> int:
    from .commands.ps import show_engines

    return show_engines(args.url, api_key=_api_key(args), as_json=args.json)


def _drain(args: argparse.Namespace) -> int:
    from .commands.drain import drain_replica

    return drain_replica(args.url, args.replica, api_key=_api_key(args), migrate=args.migrate, is_waiting=args.wait)


def _top(args: argparse.Namespace) -> int:
    from .top import show_fleet

    return show_fleet(args.url, api_key=_api_key(args), every_s=args.interval, is_once=args.once)


def _how_it_runs(config: EngineConfig, cpu_isa: str) -> str:
    how = f"precision {config.precision}"
    if config.device != "cpu":
        return f"{how}, device {config.device}"
    has_unused = "; this machine has an NVIDIA GPU, which --device cuda uses" if NVIDIA_DEVICE.exists() else ""
    return (f"{how}, CPU kernels of {cpu_isa}" if cpu_isa else how) + has_unused


def _isa_of(supervised: Any) -> str:
    """The instruction set of an engine's kernels, as the engine says; "" where none answers.

    To find it in this process would load LLVM.
    """
    found = supervised.ask("info", INFO_TIMEOUT_S)
    return next((name for info in found.values() if (name := info.get("cpu_isa"))), "")


def _isa_name(config: EngineConfig) -> str:
    from .cpu_isa import available

    return available()[0].name if config.cpu_isa == "auto" else config.cpu_isa


def _grammar(args: argparse.Namespace) -> int:
    from .constrained import GrammarError, check

    kind: Any = args.kind or _KINDS_BY_SUFFIX.get(args.file.suffix)
    if kind is None:
        return _complain(f"{args.file}: the file's suffix names no kind of grammar; add --kind")
    vocabulary = None
    if args.model is not None:
        from .runtime.tokenizer import load_tokenizer
        from .runtime.weights.resolve import resolve_model

        vocabulary = load_tokenizer(resolve_model(args.model)).vocabulary()
    try:
        text = args.file.read_text(encoding="utf-8")
        text = text.rstrip("\n") if kind == "regex" else text
        report = check(kind, text, vocabulary, texts=args.text, **dict(args.option))
    except (OSError, UnicodeDecodeError, GrammarError) as error:
        return _complain(f"{args.file}: {getattr(error, 'strerror', None) or error}")
    print(report)
    return _OK if report.is_accepting else _FAILED


def _completion(args: argparse.Namespace) -> int:
    from .commands.completion import script

    _write(script(args.shell, command_parser(), tuple(ALIASES)))
    return _OK


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import report

    for section, rows in report().items():
        print(section)
        for name, value in rows.items():
            print(f"  {name:<24} {value}")
    return _OK


def _bench(args: argparse.Namespace) -> int:
    config = _resolved_config(args)
    choose_cpu_isa(config)
    from .runtime.engine import EngineCore
    from .runtime.profiling import Load, Spans, profile_lines, run_load, watch

    engine = EngineCore(config)
    try:
        load = Load(1, 8, 2, grammar=args.grammar)
        run_load(engine, load)  # compiles kernels
        results = []
        for rows in args.rows:
            load = Load(rows, args.prompt_tokens, args.new_tokens, args.shared_tokens, args.grammar)
            run_load(engine, load)  # warm-up: captures steps of this shape
            results.append((load, run_load(engine, load)))
        if args.profile is not None:
            watch(engine, spans := Spans())
        for load, result in results:
            steps = f"prefill {result.prefill_s * 1e3:.0f} ms, then {result.decode_median_ms:.2f} ms a step"
            print(
                f"{load.rows} rows: {result.output_tokens} tokens in {result.wall_s:.2f} s, "
                f"{result.tokens_per_s:.1f} tok/s; "
                f"{steps if result.decode_ms else 'no step made exactly one token of each row, so no step was timed'}",
                flush=True,
            )
            if args.profile is not None:
                spans.clear()
                run_load(engine, load, spans=spans)
                print(*profile_lines(spans), sep="\n")
                if args.profile.name:
                    path = args.profile.with_stem(f"{args.profile.stem}-{load.rows}")
                    spans.write_trace(path)
                    print(f"  trace: {path}")
    finally:
        engine.close()
    return _OK


def _plan(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from .runtime.planning import HARDWARE, KV_BYTES, SHAPES, DeviceSplit, Goal, ModelShape, best_split, find_capacity

    unread = "fp8" if args.hardware == "cpu" else "int8"
    if args.kv_dtype == unread:
        others = ", ".join(name for name in KV_BYTES if name != unread)
        return _complain(f"--kv-dtype {unread} on {args.hardware}: no kernel reads it there; give one of {others}")

    shape = SHAPES.get(args.shape)
    if shape is None:
        from .runtime.weights import open_weights, resolve_model

        try:
            shape = ModelShape.of_file(args.shape, open_weights(resolve_model(args.shape)))
        except UnknownModel as error:
            raise UnknownModel(f"{error}; shapes that need no weights: {', '.join(SHAPES)}") from None
    if args.weight_bits or args.hardware != "cpu":
        shape = replace(shape, weight_bits=args.weight_bits or 16, eight_bit_share=0.0)
    shape = replace(shape, kv_bytes=KV_BYTES[args.kv_dtype])
    if args.hardware == "cpu":
        from .runtime.planning.measured import cpu_hardware
        from .runtime.weights.home import default_home

        hardware = cpu_hardware(default_home(), threads=args.num_threads, again=args.measure_again)
    else:
        hardware = HARDWARE[args.hardware]
    goal = Goal(args.isl, args.osl, args.ttft_s, args.tpot_s, args.cached_share, images=args.images)
    if args.devices:
        splits = best_split(shape, hardware, goal, devices=args.devices)
        print(f"{shape.describe()}, on {args.devices} x {hardware.name} ({hardware.about})")
        print(
            "tensor  pipeline  expert  sequence  replicas  batch  "
            "first token ms  token ms  joins   MB sent  joins ms  tokens/s"
        )
        for one in [one for one in splits if one.batch]:
            count, step, of = args.devices // one.split.num_devices, one.step, one.split
            split = f"{of.tensor:>6}  {of.pipeline:>8}  {of.expert:>6}  {of.sequence:>8}  {count:>8}  {one.batch:>5}"
            times = f"{one.ttft_s * 1e3:>14,.1f}  {one.tpot_s * 1e3:>8,.2f}"
            joins = f"{step.num_collectives:>5}  {step.sent_bytes / 1e6:>8,.1f}  {step.collectives * 1e3:>8,.2f}"
            print(f"{split}  {times}  {joins}  {one.tokens_per_s * count:>8,.0f}")
        if not splits[0].batch:
            print(f"no split fits: {splits[0].limit}")
            return _FAILED
        if not splits[-1].batch:
            print(f"{sum(not one.batch for one in splits)} other splits: not even one sequence fits")
        print(f"most tokens a second: {splits[0].split}")
        return _OK
    counts = (args.tensor_parallel, args.pipeline_parallel, args.expert_parallel)
    split_of = DeviceSplit(*counts, sequence=args.sequence_parallel, copies=args.expert_copies)
    found = find_capacity(shape, hardware, goal, split=split_of)
    ranks, shape = split_of.num_devices, split_of.share(shape)
    of_each = f"of each of {ranks} ranks: " if ranks > 1 else ""
    print(f"{shape.describe()}, on {hardware.name} ({hardware.about})" + (f", {ranks} devices" if ranks > 1 else ""))
    print(
        f"{of_each}weights {shape.weights_size_bytes / 1e9:.2f} GB, keys and values "
        f"{shape.slot_size_bytes / 1e3:.1f} kB a token: {found.slots:,} tokens fit"
    )
    if shape.spare_experts:
        print(f"{shape.spare_size_bytes / 1e9:.2f} GB of the weights are places for copies of experts")
    print(f"prompts of {goal.isl:,} tokens ({goal.cached_share:.0%} cached), answers of {goal.osl:,}")
    if shape.tower is not None and args.images:
        image_s, count = shape.tower.image_s(hardware), f"{args.images} image{'s' if args.images > 1 else ''}"
        print(
            f"and {count} of {shape.tower.tokens:,} tokens in {shape.tower.tiles} tiles, {image_s * 1e3:,.1f} ms each; "
            f"encoder {shape.tower.size_bytes / 1e9:.2f} GB of the weights"
        )
    if not found.batch:
        print(f"not even one sequence: {found.limit}")
        return _FAILED
    print(f"batch {found.batch} (--max-running of the engine), bounded by {found.limit}")
    print(f"time to first token {found.ttft_s * 1e3:,.1f} ms, time per token {found.tpot_s * 1e3:,.2f} ms")
    more = [name for name, has_it in (("collectives", ranks > 1), ("images", args.images > 0)) if has_it]
    for part in ("linear", "attention", "small_ops", "head", "host", *more):
        seconds = getattr(found.step, part)
        print(f"  {part.replace('_', ' '):<10} {seconds * 1e3:>10.3f} ms {seconds / found.step.total:>6.1%}")
    if ranks > 1:
        sent = found.step.sent_bytes / 1e6
        print(f"each rank joins others' results {found.step.num_collectives} times a step, and sends {sent:,.1f} MB")
    print(f"one replica: {found.tokens_per_s:,.0f} tokens/s, {found.tokens_per_s / goal.osl:,.2f} requests/s")
    if args.rate:
        count = found.replicas(goal, args.rate)
        print(f"{args.rate:g} requests/s: {count} replica{'s' if count > 1 else ''}")
    return _OK


def _quantize(args: argparse.Namespace) -> int:
    from .runtime.quantizing import quantize_model
    from .runtime.quantizing.comparison import compare
    from .runtime.quantizing.questions import QUESTIONS
    from .runtime.quantizing.texts import DOCUMENT, PROMPTS
    from .runtime.weights.resolve import resolve_model

    calibration, text = _joined_texts(args.calibration), _joined_texts(args.text)
    with progress_bars("count") as progress:
        source = resolve_model(args.model, progress=progress)
        found = quantize_model(
            source,
            args.out,
            args.scheme,
            folder_format=args.format or "",
            calibration=calibration or "\n".join(QUESTIONS),
            say=progress,
        )
    print(
        f"{found.path}: {args.scheme}, {found.num_matrices} matrices, {found.size_bytes / 1e6:,.1f} MB "
        f"(from {found.source_bytes / 1e6:,.1f} MB)"
    )
    if found.left:
        print(f"{len(found.left)} matrices stay floats, as their rows are no whole groups: {', '.join(found.left[:3])}")
    if found.num_copied:
        print(f"{found.num_copied} matrices are the original's own: it has them in this form")
    if found.was_packed and found.num_copied < found.num_matrices:
        print("the original is itself quantized: its errors stay, and are not part of what follows")
        if args.scheme == "int4-g32" and args.format == "compressed-tensors":
            print("--format mlx keeps the numbers of weights that have 4 bits in groups of 32 already")
    if args.no_measure:
        return _OK
    print("\n            precision      size  tokens/s  perplexity           same token, in text and greedy")
    with progress_bars("count") as progress:
        reference = 0.0
        for row in compare(source, args.out, text or DOCUMENT, PROMPTS, say=progress):
            reference = reference or row.perplexity
            print(
                f"{row.name:<11} {row.precision:<9} {row.size_bytes / 1e6:>6,.1f} MB {row.tokens_per_s:>9,.1f}  "
                f"{row.perplexity:>10.3f} {row.perplexity / reference - 1:>+8.2%}  {row.top1:>6.1%} {row.greedy:>6.1%}",
                flush=True,
            )
    return _OK


def _joined_texts(paths: Sequence[Path]) -> str:
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path}: {error}") from error
    return "\n\n".join(texts)


def _api_key(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get("PHLOEM_API_KEY") or None


def _resolved_config(args: argparse.Namespace, model: str | None = None) -> EngineConfig:
    """The engine config of the flags. Fetches a missing model first; a terminal shows a progress bar."""
    from .runtime.weights.resolve import resolve_model

    values = {field.name: getattr(args, field.name) for field in _engine_fields(args)}
    values["model"] = model or args.model
    with progress_bars() as progress:
        resolve_model(values["model"], progress=progress)
    return EngineConfig(**values)


def _engine_fields(args: argparse.Namespace) -> list[msgspec.structs.FieldInfo]:
    """The fields of the engine's config that the command has."""
    return [field for field in msgspec.structs.fields(EngineConfig) if hasattr(args, field.name)]


# -- arguments --------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Its errors are one line, like all others; commands are parsed by the same class."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # the flags of a command end here
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            names = [option for option in self._option_string_actions if option.startswith("--")]
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
            near = difflib.get_close_matches(flag, names, n=1, cutoff=0.75)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {near[0]}' if near else ''}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(_FAILED, f"phloem: error: {message}; see {self.prog} --help\n")


def command_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or, to begin sooner, of the one named ``only`` if there is one of that name."""
    parser = _Parser(
        prog="phloem",
        description="A language for programs that call a language model many times, and a runtime for such programs.",
    )
    parser.add_argument("--version", action="version", version=f"phloem {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    adders: dict[str, Callable[[Any], None]] = {
        "chat": _add_chat,
        "generate": _add_generate,
        "run": _add_run,
        "pull": _add_pull,
        "serve": _add_serve,
        "keys": _add_keys,
        "engine": _add_engine,
        "ps": _add_ps,
        "drain": _add_drain,
        "top": _add_top,
        "bench": _add_bench,
        "plan": _add_plan,
        "quantize": _add_quantize,
        "grammar": _add_grammar,
        "completion": _add_completion,
        "doctor": _add_doctor,
    }
    for add in [adders[only]] if only in adders else adders.values():
        add(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="show what this machine can run")
    doctor.set_defaults(run=_doctor)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model in the terminal; without a terminal each line of stdin is a message.",
    )
    chat.add_argument("model", metavar="MODEL", nargs="?", help=f"{_MODELS} (default: {next(iter(ALIASES))})")
    chat.add_argument("--system", default="", metavar="TEXT", help="the system message")
    chat.add_argument("--json-schema", type=Path, metavar="FILE", help="answers are JSON of this schema")
    _add_source_flags(chat)
    chat.set_defaults(run=_chat)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="print one answer",
        description="Print one answer of a model. Exit code 0: the whole answer was printed; 1: an error, in one line "
        "on stderr; 130: Ctrl-C.",
    )
    generate.add_argument("model", metavar="MODEL", help=f"{_MODELS}; `default`: {next(iter(ALIASES))}")
    generate.add_argument("prompt", metavar="PROMPT", help="the user's message; -: read it from stdin")
    generate.add_argument("--system", default="", metavar="TEXT", help="the system message")
    generate.add_argument("--raw", action="store_true", help="continue PROMPT as plain text, without a chat template")
    generate.add_argument("--json", action="store_true", help="print text, finish reason and usage as a line of JSON")
    grammar = generate.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", type=Path, metavar="FILE", help="the answer is JSON of this schema")
    pattern = grammar.add_argument("--regex", type=explained(parse_pattern), metavar="PATTERN")
    pattern.help = "the answer matches this pattern"
    grammar.add_argument(
        "--choices",
        type=explained(parse_choices),
        metavar="A,B",
        help="the answer is the likeliest of these",
    )
    _add_source_flags(generate)
    generate.set_defaults(run=_generate)


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a program file on a model",
        description="Run a Python file, with a model as the default backend of its programs. With --model, --url or a "
        "flag of the engine, a phloem.Runtime or Engine that the file makes is that one too.",
    )
    run.add_argument("--model", metavar="MODEL", help=f"{_MODELS} (default: {next(iter(ALIASES))})")
    _add_url_flags(run, "run on")
    add_engine_flags(run)
    run.add_argument("file", metavar="FILE.py", type=Path, help="the file; its arguments follow it")
    run.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="given to the file")
    run.set_defaults(run=_run)


def _add_url_flags(parser: argparse.ArgumentParser, do_with: str) -> None:
    parser.add_argument(
        "--url",
        "--address",
        help=f"{do_with} a running server, at http://HOST:PORT (Phloem's or an OpenAI-like one), ipc:// or tcp://; the "
        "model is then a name that it serves",
    )
    parser.add_argument("--api-key", help="the server's key (default: $PHLOEM_API_KEY, or none)")


def _add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that asks a model: where it is, how it samples, and the engine's own."""
    from .commands.sampling_flags import add_sampling_flags

    _add_url_flags(parser, "ask")
    add_sampling_flags(parser, without=("speculative",))
    add_engine_flags(parser, without=("seed",))


def _add_completion(commands: Any) -> None:
    from .commands.completion import SHELLS

    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands in a shell",
        description="Print a script that completes commands, flags and model names: source <(phloem completion bash)",
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")
    completion.set_defaults(run=_completion)


def _add_pull(commands: Any) -> None:
    pull = commands.add_parser(
        "pull",
        help="fetch a model",
        description="Fetch a model into $PHLOEM_HOME (default ~/.cache/phloem) and print its path.",
    )
    pull.add_argument("model", metavar="NAME", help=_MODELS)
    pull.set_defaults(run=_pull)


def _add_serve(commands: Any) -> None:
    from .cluster.limits import FleetLimits
    from .cluster.restarts import RestartPolicy

    policy = RestartPolicy()
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP", description="Serve a model with OpenAI's API and Phloem's own API."
    )
    serve.add_argument("model", metavar="MODEL", nargs="?", help=_MODELS)
    more = serve.add_argument("models", metavar="NAME=MODEL", nargs="*", default=[])
    more.help = "more models for the same server; the first one may have a name too"
    rules = serve.add_argument("--rules", type=Path, metavar="FILE.toml")
    rules.help = "rules that choose between a cheap and a strong one of the models"
    file = serve.add_argument("--config", type=Path, metavar="FILE.toml")
    file.help = "settings by their flags' names, for example max-running = 8; a flag that is given wins"
    serve.add_argument("--print-config", action="store_true", help="print the settings as such a file, and exit")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=parse_port, default=8000, help="port to listen on (default: %(default)s)")
    serve.add_argument("--api-key", help="refuse requests without this key (default: $PHLOEM_API_KEY, or none)")
    serve.add_argument(
        "--key-file", type=Path, metavar="FILE", help="keys and limits of several tenants; SIGHUP reads it again"
    )
    logs = serve.add_argument_group("log")
    logs.add_argument("--log-format", choices=("text", "json"), default="text", help="default: %(default)s")
    requests = logs.add_argument("--log-requests", choices=("none", "lines", "prompts"), default="none")
    requests.help = "write a line for each request; prompts: their prompts too (default: %(default)s)"
    tls = serve.add_argument_group("TLS")
    tls.add_argument("--tls-cert", type=Path, metavar="FILE", help="answer HTTPS with this certificate (chain), as PEM")
    tls.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key, unencrypted, as PEM")
    tls.add_argument("--tls-ca", type=Path, metavar="FILE", help="ask clients for a certificate that this CA signed")
    serve.add_argument("--model-name", help="the model's name in requests (default: MODEL)")
    cors = serve.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN")
    cors.help = "origin of web pages that may send requests; may be repeated"
    images = serve.add_argument("--allow-image-hosts", action="append", default=[], metavar="HOST,...")
    images.help = "fetch the images of requests from these hosts (default: from none); may be repeated"
    _add_connection_flags(serve)
    _add_store_flags(serve)
    fleet = serve.add_argument_group("replicas")
    fleet.add_argument(
        "--replicas", type=parse_at_least_one, default=1, metavar="N", help="engine processes (default: %(default)s)"
    )
    role = fleet.add_argument("--role", action="append", default=[], choices=("both", "prefill", "decode"))
    role.help = "of the next replica, from the first on: prefill computes prompts for those with decode (default: both)"
    rebalanced = fleet.add_argument("--max-rebalanced", type=parse_count, metavar="N")
    rebalanced.help = "running programs moved at once to replicas with less to do; 0: none (default: %(default)s)"
    rebalanced.default = FleetLimits().max_rebalanced
    on = fleet.add_argument("--on", choices=("here", "ray"), default="here")
    on.help = "who starts the engines: this process, or Ray Serve, which needs phloem[ray] (default: %(default)s)"
    address = fleet.add_argument("--ray-address", default="", metavar="ADDRESS")
    address.help = "with --on ray: HOST:PORT of a running Ray cluster (default: start Ray on this machine)"
    timeout = fleet.add_argument("--step-timeout-s", type=parse_duration, metavar="SECONDS")
    timeout.help = "restart an engine that sends nothing for this long (default: %(default)g)"
    timeout.default = policy.step_timeout_s
    restarts = fleet.add_argument("--max-restarts", type=parse_count, metavar="N")
    restarts.help = "mark a replica as failed after this many restarts in 10 minutes (default: %(default)s)"
    restarts.default = policy.max_restarts
    add_engine_flags(serve)
    serve.set_defaults(run=_serve, command=serve)


def _add_connection_flags(serve: argparse.ArgumentParser) -> None:
    limits, group = ConnectionLimits(), serve.add_argument_group("connections")
    for flag, default, what in (
        ("--header-timeout-s", limits.headers_s, "close a connection whose request's headers take longer"),
        ("--body-timeout-s", limits.body_s, "refuse a request whose body takes longer"),
        ("--idle-timeout-s", limits.idle_s, "close a connection that sends no other request for this long"),
        ("--write-timeout-s", limits.write_s, "close a connection that reads nothing of its answer for this long"),
    ):
        help = f"{what} (default: %(default)g)"
        group.add_argument(flag, type=parse_duration, default=default, metavar="SECONDS", help=help)
    group.add_argument(
        "--max-connections-per-address",
        type=parse_count,
        default=limits.per_address,
        metavar="N",
        help="open connections of one address; 0: any number (default: %(default)s)",
    )
    group.add_argument("--no-page", action="store_true", help="do not show the page at /")
    group.add_argument(
        "--max-concurrent",
        type=parse_count,
        default=0,
        metavar="N",
        help="requests that are answered at once, waiting ones included; 0: any number (default: %(default)s)",
    )


def _add_keys(commands: Any) -> None:
    keys = commands.add_parser("keys", help="make keys for tenants", description="Make keys for a server's key file.")
    actions = keys.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="make a key",
        description="Print a new key, once, and the lines for the file of `phloem serve --key-file`.",
    )
    new.add_argument("name", metavar="NAME", help="the tenant")
    new.set_defaults(run=_new_key)


def _add_store_flags(serve: argparse.ArgumentParser) -> None:
    limits, group = StoreLimits(), serve.add_argument_group("stored responses")
    for flag, kind, default, unit, what in (
        ("--max-stored-responses", parse_count, limits.max_count, "N", "responses kept; 0: none"),
        ("--max-stored-bytes", parse_count, limits.max_bytes, "BYTES", "bytes that they may take"),
        ("--stored-lifetime-s", parse_duration, limits.lifetime_s, "SECONDS", "drop a response after this long"),
    ):
        group.add_argument(flag, type=kind, default=default, metavar=unit, help=f"{what} (default: %(default)s)")


def _add_engine(commands: Any) -> None:
    engine = commands.add_parser(
        "engine",
        help="run an engine for programs that connect to it",
        description="Run an engine without HTTP; programs use phloem.connect(URL).",
    )
    engine.add_argument("model", metavar="MODEL", help=_MODELS)
    engine.add_argument("--url", required=True, help="ipc:///path/of/a/socket, or tcp://127.0.0.1:PORT")
    add_engine_flags(engine)
    engine.set_defaults(run=_engine)


def _add_ps(commands: Any) -> None:
    ps = commands.add_parser(
        "ps",
        help="show a server's model and engines",
        description="Show the model of a running server and its engines: state, rows that run, queue, cache, memory.",
    )
    _add_server_arguments(ps)
    ps.add_argument("--json", action="store_true", help="print the report as a line of JSON")
    ps.set_defaults(run=_ps)


def _add_drain(commands: Any) -> None:
    drain = commands.add_parser(
        "drain",
        help="take a replica of a server out of service",
        description="Give a replica no new programs, and stop its engine once those that run there have ended.",
    )
    drain.add_argument("replica", metavar="REPLICA", help="its name, as phloem ps shows it")
    _add_server_arguments(drain)
    drain.add_argument("--migrate", action="store_true", help="move its programs to other replicas")
    drain.add_argument(
        "--wait", action=argparse.BooleanOptionalAction, default=True, help="return when it is stopped (default)"
    )
    drain.set_defaults(run=_drain)


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--api-key", help="the server's key (default: $PHLOEM_API_KEY, or none)")


def _add_top(commands: Any) -> None:
    top = commands.add_parser(
        "top",
        help="watch a server's engines and programs",
        description="Show a server's engines, their load and restarts, and the longest programs; refresh until Ctrl-C.",
    )
    _add_server_arguments(top)
    top.add_argument(
        "--interval",
        type=parse_duration,
        default=1.0,
        metavar="SECONDS",
        help="time between two views (default: %(default)g)",
    )
    top.add_argument("--once", action="store_true", help="print one view and exit")
    top.set_defaults(run=_top)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure the engine's speed in this process",
        description="Run sequences of random tokens in this process, without a server, and print the engine's speed. "
        "It uses no drafts, because answers to random tokens soon repeat themselves; --speculative auto turns them on.",
    )
    bench.add_argument("model", metavar="MODEL", help=_MODELS)
    bench.add_argument("--rows", type=parse_at_least_one, nargs="+", default=[1, 16], help="sequences at once")
    bench.add_argument("--prompt-tokens", type=parse_at_least_one, default=100, metavar="N", help="tokens of a prompt")
    bench.add_argument("--shared-tokens", type=parse_count, default=0, metavar="N", help="of these, shared by all")
    bench.add_argument("--new-tokens", type=parse_at_least_one, default=64, metavar="N", help="tokens to generate")
    bench.add_argument("--grammar", action="store_true", help="answers follow a JSON schema and may end earlier")
    profile = bench.add_argument("--profile", nargs="?", type=Path, const=Path(), metavar="TRACE.json")
    profile.help = "print the time of each part of a step; with a file name, also write Chrome traces TRACE-ROWS.json"
    add_engine_flags(bench)
    bench.set_defaults(run=_bench, speculative="off")


def _add_quantize(commands: Any) -> None:
    quantize = commands.add_parser(
        "quantize",
        help="round a model's weights to few bits",
        description="Write a model with the matrices of its layers in 4 or 8 bits, and print its size, speed, "
        "perplexity and agreement beside the original's.",
    )
    quantize.add_argument("model", metavar="MODEL", help=_MODELS)
    quantize.add_argument(
        "--out", type=Path, required=True, metavar="DIR|FILE.gguf", help="a new folder of safetensors, or a GGUF file"
    )
    quantize.add_argument(
        "--scheme",
        choices=("int8", "int4-g32", "int4-awq", "fp8"),
        required=True,
        help="int8: groups of 32 (GGUF: Q8_0); int4-g32: groups of 32 (Q4_1); int4-awq: groups of inputs that are "
        "scaled by their size; fp8: rows of 8-bit floats, not in GGUF",
    )
    quantize.add_argument(
        "--format",
        choices=("compressed-tensors", "awq", "mlx"),
        help="of a folder. compressed-tensors: read by vLLM and transformers (default of int8 and fp8); awq: by these "
        "too (default of int4-awq); mlx: by mlx-lm, keeps the most of 4-bit weights (default of int4-g32)",
    )
    quantize.add_argument(
        "--calibration", type=Path, nargs="*", default=[], metavar="FILE", help="text for 4 bits (default: our own)"
    )
    quantize.add_argument(
        "--text", type=Path, nargs="*", default=[], metavar="FILE", help="text to measure on (default: our own)"
    )
    quantize.add_argument("--no-measure", action="store_true", help="print the size alone")
    quantize.set_defaults(run=_quantize)


def _add_plan(commands: Any) -> None:
    from .runtime.planning import HARDWARE, KV_BYTES, SHAPES

    plan = commands.add_parser(
        "plan",
        help="predict speed and size of a deployment",
        description="Predict batch size, speed and number of replicas from a model's shape and a machine's rates.",
    )
    plan.add_argument("shape", metavar="SHAPE", help=f"one of {', '.join(SHAPES)}, or any MODEL")
    plan.add_argument("--hardware", choices=["cpu", *HARDWARE], default="cpu", help="cpu: this machine, measured once")
    plan.add_argument("--isl", type=parse_at_least_one, default=1000, metavar="TOKENS", help="length of a prompt")
    plan.add_argument("--osl", type=parse_at_least_one, default=200, metavar="TOKENS", help="length of an answer")
    plan.add_argument(
        "--ttft-s", type=parse_time_limit, default=float("inf"), metavar="SECONDS", help="limit of time to first token"
    )
    plan.add_argument(
        "--tpot-s", type=parse_time_limit, default=float("inf"), metavar="SECONDS", help="limit of time per token"
    )
    plan.add_argument("--rate", type=parse_rate, default=0.0, metavar="N", help="requests per second to serve; 0: any")
    plan.add_argument(
        "--cached-share", type=parse_cached_share, default=0.0, metavar="SHARE", help="cached share of a prompt"
    )
    images = plan.add_argument("--images", type=parse_count, default=0, metavar="N")
    images.help = "images of a prompt beside its --isl tokens, of a model that reads them"
    plan.add_argument("--weight-bits", type=int, choices=[4, 8, 16, 32], help="default: 4 on a CPU, 16 elsewhere")
    kv_help = "type of keys and values (default: %(default)s)"
    plan.add_argument("--kv-dtype", choices=list(KV_BYTES), default="bfloat16", help=kv_help)
    split = plan.add_mutually_exclusive_group()
    ranks_help = "devices that share out every layer (default: %(default)s)"
    split.add_argument("--tensor-parallel", type=parse_at_least_one, default=1, metavar="N", help=ranks_help)
    split.add_argument("--devices", type=parse_count, default=0, metavar="N", help="compare the splits of N devices")
    stages_help = (
        "devices, or groups of tensor-parallel devices, that each have some of the layers (default: %(default)s)"
    )
    plan.add_argument("--pipeline-parallel", type=parse_at_least_one, default=1, metavar="N", help=stages_help)
    experts_help = "parts of the tensor-parallel devices that each have some of the experts (default: %(default)s)"
    plan.add_argument("--expert-parallel", type=parse_at_least_one, default=1, metavar="N", help=experts_help)
    slots_help = "copies of these devices that each keep a part of every sequence (default: %(default)s)"
    plan.add_argument("--sequence-parallel", type=parse_at_least_one, default=1, metavar="N", help=slots_help)
    copies_help = "experts of other parts that each device has memory to copy, in every layer (default: %(default)s)"
    plan.add_argument("--expert-copies", type=parse_count, default=0, metavar="N", help=copies_help)
    plan.add_argument("--num-threads", type=parse_count, default=0, metavar="N", help="CPU threads; 0: one per core")
    plan.add_argument("--measure-again", action="store_true", help="measure this CPU again")
    plan.set_defaults(run=_plan)


def _add_grammar(commands: Any) -> None:
    grammar = commands.add_parser(
        "grammar",
        help="check a grammar or schema",
        description="Compile a grammar and print overlaps, rules that never match, the number of allowed first tokens, "
        "the use of each limit, and whether example texts are accepted (exit code 2 if one is not).",
    )
    grammar.add_argument("file", metavar="FILE", type=Path, help="the grammar's text")
    grammar.add_argument(
        "--kind", choices=GRAMMAR_KINDS, help="default: by the file's suffix (.json, .lark, .ebnf, .gbnf, .regex)"
    )
    grammar.add_argument("--text", action="append", default=[], help="example text to check; may be repeated")
    grammar.add_argument("--model", metavar="MODEL", help="model with the tokens (default: every byte is a token)")
    grammar.add_argument(
        "--option",
        action="append",
        default=[],
        type=_parse_option,
        metavar="NAME=VALUE",
        help="an option of the grammar, such as start=RULE or whitespace=compact; may be repeated",
    )
    grammar.set_defaults(run=_grammar)


def _parse_option(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


# -- what the user sees -----------------------------------------------------------------------------------------------


def _complain(message: str, *, code: int = _FAILED) -> int:
    print(f"phloem: error: {' '.join(message.splitlines())}", file=sys.stderr)
    return code


def _note(message: str) -> None:
    print(f"phloem: note: {message}", file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _set_up_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(levelname).1s %(asctime)s %(name)s: %(message)s")


@contextmanager
def _loading_bars(greeting: Callable[[str], str]) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """``(progress, on_ready)``: progress bars of the loading, and a callback that replaces them with the greeting."""
    bars = Bars("count")

    def ready(url: str) -> None:
        bars.stop()
        print(greeting(url), flush=True)

    try:
        yield bars.show, ready
    finally:
        bars.stop()
