"""The workloads: both forms of a task do the same work and give the same answers, and cases follow from their seed."""

import asyncio
import json
import re
from dataclasses import replace

import phloem
import pytest
from phloem.benchmarks.workloads import ablations, measure, page, profiled
from phloem.benchmarks.workloads.__main__ import parsed
from phloem.benchmarks.workloads.catalogue import WORKLOADS
from phloem.benchmarks.workloads.clients import OURS, OpenAIClient, Usage, gbnf
from phloem.benchmarks.workloads.held import held_figures, keep
from phloem.benchmarks.workloads.systems import SYSTEMS, Run, run_plain, run_programs
from phloem.engines import make_config
from phloem.runtime.engine import ready_engine
from phloem.runtime.server.app import create_app
from phloem.runtime.tokenizer import load_chat_template, load_tokenizer
from phloem.tests.runtime.models.tiny import VOCAB_SIZE, make_tiny_model
from phloem.tests.runtime.server.doubles import MODEL, live_server

# The tiny model's tokens are bytes and three special ones: only letters and spaces survive a way through text.
BIAS = {"logit_bias": {token: -100.0 for token in range(VOCAB_SIZE) if token != 32 and not 97 <= token <= 122}}
IN_FULL = [name for name in WORKLOADS if name != "beam_search"]  # a beam search takes no bias


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(an engine with a tiny random model in float32, the address of a server over it)"""
    path = make_tiny_model(tmp_path_factory.mktemp("long"), seed=0, max_positions=1 << 16)
    with phloem.Engine(model=str(path), num_slots=1 << 16, precision="float32") as engine:
        tokenizer = load_tokenizer(path)
        app = create_app(engine.client, tokenizer, load_chat_template(path, tokenizer), model_name=MODEL)
        with live_server(app) as url:
            yield engine, url


def run_both(served, name, *, num=2, **sampling):
    engine, url = served
    workload = WORKLOADS[name]
    cases = workload.make(7, num)

    async def plain():
        client = OpenAIClient(url, MODEL, OURS, **sampling)
        try:
            return await run_plain(client, workload, cases, alone=False)
        finally:
            await client.close()

    program = run_programs(engine, workload, cases, alone=False, ignore_eos=True, **sampling)
    return program, asyncio.run(plain())


@pytest.mark.parametrize("name", IN_FULL)
def test_a_program_and_its_plain_form_give_the_same_answers_with_as_many_tokens(served, name):
    program, plain = run_both(served, name, **({} if "json" in name else BIAS))
    assert program.answers == plain.answers
    assert len(program.answers) == 2 and all(program.answers)
    assert program.usage.requests <= plain.usage.requests
    if name != "hellaswag":  # its program scores letters and generates none
        assert program.usage.output_tokens == plain.usage.output_tokens
    if not WORKLOADS[name].needs_grammar:
        assert plain.usage.output_tokens == 2 * WORKLOADS[name].free_tokens


def test_a_beam_search_looks_at_as_many_tokens_in_both_forms(served):
    program, plain = run_both(served, "beam_search")
    assert program.usage.output_tokens == plain.usage.output_tokens
    assert len(program.answers) == len(plain.answers) == 2
    assert program.answers[1] == plain.answers[1]  # the program's first beam ends at a token that ends a text


@pytest.mark.parametrize("name", WORKLOADS)
def test_cases_follow_from_their_seed(name):
    make = WORKLOADS[name].make
    assert make(3, 4) == make(3, 4)
    assert all(one not in make(3, 4) for one in make(4, 4))


def test_a_regex_is_written_as_a_grammar_of_llama_cpp():
    assert gbnf("[0-9]{1,4}") == "root ::= [0-9]{1,4}"
    assert gbnf(r"a\.(b|[^\n])+\n") == r'root ::= "a" "." ( "b" | [^\n] )+ "\n"'
    assert gbnf(r'\{"x"\}') == r'root ::= "{" "\"" "x" "\"" "}"'


def test_every_regex_of_a_workload_is_one_that_python_reads():
    from phloem.benchmarks.workloads import json_extraction, react, skeleton_of_thought

    case = json_extraction.make(1, 1)[0]
    assert re.fullmatch(json_extraction.REGEX, json.dumps(case.expected))
    assert re.fullmatch(react.ACTION, "Open[fill]")
    assert re.fullmatch(skeleton_of_thought.SKELETON, "".join(f"{i}. See the old market\n" for i in (1, 2, 3)))


# -- the command and its figures ------------------------------------------------------------------------------------


class Fixed:
    """A system whose programs take ``wall_s`` together, and that answers ``answer``."""

    version = "1"

    def __init__(self, name, wall_s, answer="A", tokens=1, fault=None):
        self.name, self.wall_s, self.answer, self.tokens, self.ran = name, wall_s, answer, tokens, []
        self.fault, self.num_stops = fault, 0

    def start(self):
        self.fail()

    def stop(self):
        self.num_stops += 1

    def fail(self):
        if self.fault is not None:
            raise self.fault

    def run(self, workload, cases, *, alone, to_the_end=True):
        self.fail()
        self.ran.append((cases[0], alone, to_the_end))
        usage = Usage(len(cases), 10, 5, self.tokens * len(cases))
        return Run(self.wall_s, [self.answer] * len(cases), [self.wall_s] * alone * len(cases), usage)


def measured(*systems, repeats=1):
    said = []
    found = measure.measure(
        systems, [WORKLOADS["mmlu"]], repeats=repeats, alone=2, count=lambda one: one.quick, say=said.append
    )
    return found, said


def test_systems_take_turns_on_the_same_cases_and_each_repeat_has_new_ones():
    program, http = Fixed("program", 1.0), Fixed("http", 2.0)
    found, _ = measured(program, http, repeats=2)
    assert program.ran == http.ran and len({case.inputs["examples"] for case, *_ in program.ran}) == 4
    assert found["mmlu"]["http"].wall_s == [2.0, 2.0] and len(found["mmlu"]["http"].latency_s) == 2 * 2
    assert measure.ratios(found, "http") == {"mmlu": 2.0}
    expected = [case.expected for case in WORKLOADS["mmlu"].make(2, WORKLOADS["mmlu"].quick)]
    assert found["mmlu"]["program"].right == expected.count("A")


class EndsItsTexts(Fixed):
    """Its forced texts lack the answer that a text which ends itself has."""

    def run(self, workload, cases, *, alone, to_the_end=True):
        run = super().run(workload, cases, alone=alone, to_the_end=to_the_end)
        return run if to_the_end else replace(run, answers=[case.expected for case in cases])


def test_right_answers_are_counted_where_the_model_ends_its_texts():
    rag, mmlu = WORKLOADS["rag"], WORKLOADS["mmlu"]
    for workload, right in ((rag, 2), (mmlu, 0)):
        system = EndsItsTexts("program", 1.0, answer="")
        assert measure.num_right(system, workload, workload.make(1, 2), ["", ""]) == right
        assert [to_the_end for *_, to_the_end in system.ran] == [False] * (workload is rag)


def test_a_system_that_fails_is_named_and_the_others_go_on():
    found, said = measured(Fixed("llama.cpp", 1.0, fault=RuntimeError("no grammars here")), Fixed("program", 1.0))
    assert list(found["mmlu"]) == ["program"]
    assert said[0].startswith("mmlu on llama.cpp failed") and "no grammars here" in said[0]


def test_a_system_that_takes_too_long_is_stopped_and_left_out_from_then_on():
    slow, program = Fixed("llama.cpp", 1.0, fault=TimeoutError()), Fixed("program", 1.0)
    found, said = measured(slow, program, repeats=2)
    assert (slow.ran, slow.num_stops) == ([], 1) and len(program.ran) == 4
    assert sum("llama.cpp failed: not done after 300 s" in text for text in said) == 1
    assert list(found["mmlu"]) == ["program"]


def test_a_system_that_does_not_start_is_named_and_stopped():
    said, one = [], Fixed("openvino", 1.0, fault=RuntimeError("no such file"))
    assert not measure.start(one, said.append) and measure.start(Fixed("program", 1.0), said.append)
    assert one.num_stops == 1 and said[0].startswith("openvino did not start") and "no such file" in said[0]


def test_figures_are_kept_after_each_workload():
    kept = []
    measure.measure(
        [Fixed("program", 1.0)],
        [WORKLOADS["mmlu"], WORKLOADS["rag"]],
        repeats=1,
        alone=1,
        count=lambda one: one.quick,
        say=lambda text: None,
        keep=lambda found: kept.append(list(found)),
    )
    assert kept == [["mmlu"], ["mmlu", "rag"]]


def test_bars_are_judged_by_the_mean_and_by_the_lowest_ratio():
    found, _ = measured(Fixed("program", 1.0), Fixed("llama.cpp", 7.0), Fixed("openvino", 2.0))
    judged = [measure.judged(found, bar) for bar in measure.BARS]
    assert "7.00x" in judged[0] and judged[0].endswith("holds")
    assert "2.00x" in judged[1] and judged[1].endswith("MISSED")
    assert judged[3].endswith("against http: not measured")


def test_other_work_is_told():
    found, _ = measured(Fixed("program", 1.0), Fixed("http", 1.0, tokens=5))
    assert measure.count_faults(found, WORKLOADS) == ["mmlu on http: 30 output tokens, ours by program 6"]


def test_equal_answers_are_counted_where_the_model_ends_them():
    program, http = Fixed("program", 1.0), Fixed("http", 1.0)
    assert measure.same_answers(program, http, WORKLOADS["mmlu"], 3) == (3, 3)
    assert not program.ran[0][2]
    assert measure.same_answers(program, Fixed("http", 1.0, answer="B"), WORKLOADS["mmlu"], 3) == (0, 3)


def test_saved_figures_of_other_models_and_workloads_stay_and_a_row_is_of_one_run(tmp_path):
    path = tmp_path / "workloads.json"
    one, _ = measured(Fixed("program", 1.0))
    two, _ = measured(Fixed("http", 2.0))
    keep(path, "large", {"machine": "here"}, measure.as_json(one), {})
    keep(path, "small", {"machine": "here"}, {"rag": {}, **measure.as_json(one)}, {"mmlu": (3, 3)})
    keep(path, "small", {"machine": "here"}, measure.as_json(two), {})
    held = json.loads(path.read_text())["models"]
    small = held["small"]
    assert list(small["workloads"]) == ["rag", "mmlu"] and small["same_answers"] == {"mmlu": [3, 3]}
    assert list(small["workloads"]["mmlu"]) == ["http"]
    assert measure.from_json(held["large"]["workloads"])["mmlu"]["program"] == one["mmlu"]["program"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["mmlu", "mlmu"], "'mlmu' is not one of: mmlu, hellaswag"),
        (["mmlu", "--systems", "vllm"], "'vllm' is not one of: program, http"),
        ([], "give --all, --quick or the names of workloads"),
        (["--all", "mmlu"], "--all and mmlu: give either"),
        (["mmlu", "--repeats", "0"], "--repeats 0: must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(given, told, capsys):
    with pytest.raises(SystemExit):
        parsed(given)
    assert told in capsys.readouterr().err


def test_a_quick_run_has_the_systems_of_the_bars_unless_others_are_named():
    assert parsed(["--quick"]).systems == ["program", "http", "llama.cpp", "openvino"]
    assert parsed(["--all"]).systems == list(SYSTEMS)
    assert parsed(["--all"]).models == ["smollm2", "qwen2.5-coder-1.5b"] and parsed(["--quick"]).models == ["smollm2"]
    assert parsed(["--quick", "--systems", "transformers, http"]).systems == ["transformers", "http"]


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_figures_and_the_programs_of_the_source_files():
    text = page.PAGE.read_text()
    assert page.render(text, held_figures()) == text, "python -m benchmarks.workloads.page writes it again"
    for name, workload in WORKLOADS.items():
        assert f"<!-- made: {name} -->" in text and page.source(workload.program.func) in text
        assert page.num_lines(page.source(workload.program.func)) <= 20


def test_the_charts_are_those_of_the_figures():
    for name, svg in page.charts(held_figures()).items():
        assert (page.IMAGES / name).read_text() == svg, "python -m benchmarks.workloads.page writes it again"


def test_a_table_has_the_median_the_spread_and_the_right_answers():
    found, _ = measured(Fixed("program", 2.0), Fixed("http", 4.0), repeats=2)
    found["mmlu"]["program"].wall_s = [1.0, 2.0, 4.0]
    row = page.throughput_table(found).splitlines()[-1]
    assert row.startswith("| mmlu | 3.00 (1.50 to 6.00), ") and "| 1.50 (1.50 to 1.50), " in row
    assert page.latency_table(found).splitlines()[-1] == "| mmlu | 2.00 | 4.00 |"


def test_ablations_are_shares_of_the_engine_with_as_many_slots():
    systems = [Fixed("whole", 1.0), Fixed("no-cache", 4.0), Fixed("tight", 2.0), Fixed("random-order", 2.5)]
    found, _ = measured(*systems)
    by_name = {one.name: one for one in ablations.ABLATIONS}
    assert ablations.gains(found, by_name["no-cache"]) == {"mmlu": pytest.approx(0.25)}
    assert ablations.gains(found, by_name["random-order"]) == {"mmlu": pytest.approx(0.8)}
    assert ablations.gains(found, by_name["no-drafts"]) == {}
    assert {one.against for one in ablations.ABLATIONS} <= set(by_name)
    for one in ablations.ABLATIONS:
        make_config("smollm2", {**one.options, "num_slots": one.num_slots})


def test_a_profile_counts_the_steps_and_shares_out_the_wall_time(tmp_path):
    core = ready_engine(make_config(str(make_tiny_model(tmp_path / "model", seed=1)), {"num_threads": 1}))
    watched, backend = profiled.Watched(core), phloem.Engine.over(core)
    try:
        found = watched.profile(backend, "beam_search", 0)
    finally:
        backend.shutdown()
    assert 0 < found.steps <= found.rows <= found.tokens and found.recorded <= found.steps
    assert {"attention", "other kernels", "python", "between"} <= set(found.seconds)  # torch multiplies its weights
    assert found.line("name").startswith(f"| name | {found.steps} | {found.recorded} | ")


def test_what_is_no_kernel_is_python_and_what_is_no_step_is_between():
    spans = [("linear", 2_000_000), ("norm", 0), ("step", 500_000), ("watching", 1_000_000), ("sample", 250_000)]
    found = profiled.by_part(iter(spans), 0.005)
    assert found["products"] == pytest.approx(0.002) and found["other kernels"] == pytest.approx(0.00025)
    assert found["python"] == pytest.approx(0.0005) and found["between"] == pytest.approx(0.00125)
