"""Adapters that come and go while programs run: each program keeps its own, and no cached prefix changes hands."""

from pathlib import Path

import phloem
import pytest
from phloem.cluster.client import FleetClient
from phloem.protocol import messages as m
from phloem.protocol import ops as o
from phloem.protocol.errors import InvalidParams, UnknownModel, Unsupported
from phloem.runtime.config import EngineConfig
from phloem.runtime.engine import EngineCore
from phloem.runtime.engine.adapters import Adapters
from phloem.tests.runtime.engine.driver import GREEDY, Driver, Outcome
from phloem.tests.runtime.models.lora import make_adapter, merge
from phloem.tests.runtime.models.tiny import make_tiny_model

SIZES = {"precision": "float32", "num_slots": 512, "max_seq_len": 128, "num_threads": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("adapters")
    base = make_tiny_model(at / "base", seed=0)
    found = {"base": base}
    for seed, (name, rank) in enumerate({"poet": 2, "judge": 5, "cook": 3}.items()):
        found[name] = make_adapter(at / name, base, seed=seed, rank=rank)
        found[f"merged {name}"] = merge(at / f"merged-{name}", base, found[name])
    return found


def core(folders: dict[str, Path], model: str = "base", **options: object) -> EngineCore:
    return EngineCore(EngineConfig(**{"model": str(folders[model]), **SIZES, **options}))


def begin(driver: Driver, adapter: str) -> Outcome:
    ops = [o.Text(op=0, seq=0, text="The same text for all"), o.Gen(op=1, seq=0, params=GREEDY), o.Close(op=2, seq=0)]
    return driver.submit(ops, settings=m.ProgramSettings(adapter=adapter))


def said(driver: Driver, adapter: str) -> object:
    outcome = begin(driver, adapter)
    driver.run()
    return outcome.value(1)


def change(driver: Driver, message: m.LoadAdapter | m.UnloadAdapter) -> m.Answer:
    (answer,) = [found for _, found in driver.engine.step([(b"operator", message)]) if isinstance(found, m.Answer)]
    return answer


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, object]:
    names = {"": "base", **{name: f"merged {name}" for name in ("poet", "judge", "cook")}}
    found = {name: said(Driver(core(folders, model)), "") for name, model in names.items()}
    assert len({str(text) for text in found.values()}) == 4
    return found


def test_loaded_and_unloaded_ones_say_what_merged_weights_say(
    folders: dict[str, Path], expected: dict[str, object]
) -> None:
    driver = Driver(core(folders, adapters={"poet": str(folders["poet"])}))
    assert change(driver, m.LoadAdapter(1, "judge", str(folders["judge"]))).error is None
    assert [said(driver, name) for name in ("poet", "judge", "", "poet")] == [
        expected[name] for name in ("poet", "judge", "", "poet")
    ]
    assert change(driver, m.UnloadAdapter(2, "poet")).error is None
    assert [said(driver, name) for name in ("judge", "")] == [expected["judge"], expected[""]]
    refused = begin(driver, "poet")
    driver.run()
    assert refused.rejected is not None and "adapter 'poet' is unknown; there are judge" in str(refused.rejected.errors)
    assert driver.engine.welcome().adapters == ("judge",)
    assert change(driver, m.LoadAdapter(3, "cook", str(folders["cook"]))).error is None  # in poet's place
    assert [said(driver, name) for name in ("cook", "judge")] == [expected["cook"], expected["judge"]]


def test_other_weights_of_the_same_name_share_no_cached_prefix(
    folders: dict[str, Path], expected: dict[str, object]
) -> None:
    driver = Driver(core(folders))
    for i, name in enumerate(("poet", "judge", "poet")):
        assert change(driver, m.LoadAdapter(i, "x", str(folders[name]))).error is None
        assert said(driver, "x") == expected[name]
        assert said(driver, "x") == expected[name]  # from the cache
        assert change(driver, m.UnloadAdapter(10 + i, "x")).error is None


def test_running_programs_keep_theirs_until_they_end(folders: dict[str, Path], expected: dict[str, object]) -> None:
    driver = Driver(core(folders))
    change(driver, m.LoadAdapter(1, "poet", str(folders["poet"])))
    outcome = begin(driver, "poet")
    driver.step()
    driver.step()
    assert outcome.closed is None
    (listed,) = change(driver, m.UnloadAdapter(2, "poet")).value
    assert (listed["unloading"], listed["programs"]) == (True, 1)
    (left, come) = change(driver, m.LoadAdapter(3, "poet", str(folders["judge"]))).value
    assert left["unloading"] and not come["unloading"]
    later = begin(driver, "poet")
    driver.run()
    assert (outcome.value(1), later.value(1)) == (expected["poet"], expected["judge"])
    answer = change(driver, m.UnloadAdapter(4, "poet"))
    assert answer.value == [] and driver.engine.adapters.names == ()


WRONG = [
    ("", "poet", "InvalidParams", "adapter name '' of 0 characters"),
    ("a" * 300, "poet", "InvalidParams", "of 300 characters; give 1 to 256"),
    ("there", "poet", "InvalidParams", "adapter 'there' is loaded already"),
    ("x", "../elsewhere", "InvalidParams", "(--adapter-folder); put the adapter there"),
    ("x", "/etc", "InvalidParams", "(--adapter-folder); put the adapter there"),
    ("x", "a\0b", "InvalidParams", "(--adapter-folder); put the adapter there"),
    ("x", "nowhere", "InvalidParams", "(--adapter-folder); put the adapter there"),
    ("x", "base", "UnknownModel", "adapter_config.json cannot be read"),
    ("x", "wide", "UnknownModel", "it was made for another model"),
]


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(
    folders: dict[str, Path], expected: dict[str, object]
) -> None:
    root = folders["base"].parent
    make_adapter(root / "wide", make_tiny_model(root / "wide base", seed=0, hidden_size=96), seed=0, rank=2)
    driver = Driver(core(folders, adapter_folder=str(root), adapters={"there": str(folders["cook"])}))
    for name, path, kind, message in WRONG:
        answer = change(driver, m.LoadAdapter(1, name, path))
        assert answer.error is not None and answer.error.kind == kind and message in answer.error.message, answer
    assert driver.engine.adapters.names == ("there",) and said(driver, "there") == expected["cook"]
    assert change(driver, m.LoadAdapter(2, "x", "poet")).error is None  # relative to the folder
    assert said(driver, "x") == expected["poet"]


def test_ranks_and_unknown_names_are_refused() -> None:
    adapters = Adapters({}, lambda index, name, path: None, refusal="this engine has several ranks")
    with pytest.raises(Unsupported, match="not loaded or unloaded while it runs: this engine has several ranks"):
        adapters.load("a", "/")
    with pytest.raises(UnknownModel, match="adapter 'a' is not loaded; there are none"):
        Adapters({}, lambda index, name, path: None).unload("a")


def test_engines_of_a_fleet_have_the_same_adapters_also_those_that_come_later(
    folders: dict[str, Path], expected: dict[str, object]
) -> None:
    @phloem.function
    def tell(s):  # type: ignore[no-untyped-def]
        s += "The same text for all"
        s += phloem.gen("it", max_tokens=12, temperature=0, ignore_eos=True)

    given = {"cook": str(folders["cook"])}
    fleet = FleetClient(tokenize=lambda ops: [])
    with (
        phloem.Engine(model=str(folders["base"]), adapters=given, **SIZES) as first,
        phloem.Engine(model=str(folders["base"]), adapters=given, **SIZES) as second,
    ):
        try:
            fleet.add("0", first.client)
            fleet.load_adapter("poet", str(folders["poet"]))
            fleet.unload_adapter("cook")
            with pytest.raises(InvalidParams, match="no folder"):
                fleet.load_adapter("judge", "/nowhere")
            fleet.add("1", second.client)
            assert fleet.adapters == first.client.adapters == second.client.adapters == ("poet",)
            assert [one["name"] for one in fleet.list_adapters()] == ["poet"]
            for engine in (first, second):
                assert [tell.run(backend=engine, adapter="poet")["it"]] == expected["poet"]
        finally:
            fleet.close()
