"""The page in Chromium: `make test-browser`. Its twin without a browser is tests/runtime/server/test_page.py.

It needs selenium, chromium and chromedriver; the accessibility test also axe-core, in the file that PHLOEM_AXE names.
"""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from phloem.tests.runtime.server.test_serve import address, running

pytestmark = [pytest.mark.browser, pytest.mark.model]

WAIT_S = 120
SERIOUS = ("serious", "critical")
SERVE = """
import sys
from phloem.runtime.config import EngineConfig
from phloem.runtime.server import serve
key = sys.argv[2] or None
config = EngineConfig(model=sys.argv[1], num_slots=2048)
sys.exit(serve(config, port=0, api_key=key, model_name="smollm2", on_ready=lambda url: print(url, flush=True)))
"""


@contextlib.contextmanager
def served(model: Path, key: str = "") -> Iterator[str]:
    with running([sys.executable, "-c", SERVE, str(model), key]) as started:
        yield address(started)


@pytest.fixture(scope="module")
def url(smollm2_path: Path) -> Iterator[str]:
    with served(smollm2_path) as url:
        yield url


class Page:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def find(self, css: str) -> Any:
        return self.driver.find_element("css selector", css)

    def texts(self, css: str) -> list[str]:
        return [element.text for element in self.driver.find_elements("css selector", css)]

    def type(self, css: str, text: str, *, clear: bool = False) -> None:
        element = self.find(css)
        if clear:
            element.clear()
        element.send_keys(text)

    def until(self, what: Callable[[], Any]) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT_S).until(lambda _: what())

    def open(self, tab: str) -> None:
        self.find(f"#tab-{tab}").click()
        self.until(lambda: self.find(f"#{tab}").is_displayed())

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def faults(self) -> list[Any]:
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture
def page(url: str, tmp_path: Path) -> Iterator[Page]:
    with browsing(url, tmp_path) as page:
        yield page
        assert page.faults() == []


@contextlib.contextmanager
def browsing(url: str, tmp_path: Path, *, width: int = 1280, height: int = 1000) -> Iterator[Page]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    places = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    for name, place in places.items():
        if place is None:
            pytest.skip(f"{name} is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = places["chromium"]
    for argument in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", f"user-data-dir={tmp_path / 'profile'}"),
        f"window-size={width},{height}",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(places["chromedriver"]))
    try:
        driver.get(url)
        page = Page(driver)
        yield page
    finally:
        driver.quit()


def ask(page: Page, text: str) -> str:
    """Ask in the chat; returns the last answer, once it is whole."""
    before = len(page.texts(".message"))
    page.type("#question", text + "\n")
    page.until(lambda: len(page.texts(".message")) == before + 2 and not page.find("#send").get_attribute("disabled"))
    assert "tokens of prompt" in page.find("#chat-state").text, page.find("#chat-state").text
    return page.texts(".message .said")[-1]


def test_a_chat_streams_and_shows_what_else_was_likely(page: Page) -> None:
    page.until(lambda: page.find("#model").text == "smollm2")
    page.type("#temperature", "0", clear=True)
    assert ask(page, "Name three trees.")
    ask(page, "And three flowers?")
    assert "0 of them from the cache" not in page.find("#chat-state").text
    token = page.driver.find_elements("css selector", "#messages .token[data-tip]")[0]
    page.driver.execute_script("arguments[0].focus()", token)
    tip = page.find("#tip").text
    assert "%" in tip and "instead of it:" in tip


def test_a_wrong_schema_is_explained_and_a_right_one_followed(page: Page) -> None:
    page.type("#schema", '{"type": "obj')
    page.until(lambda: "not JSON yet" in page.find("#schema-state").text)
    page.type("#schema", '{"type": "objct"}', clear=True)
    page.until(lambda: 'unknown type "objct"' in page.find("#schema-state").text)
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    page.type("#schema", json.dumps(schema), clear=True)
    page.until(lambda: "will follow this schema" in page.find("#schema-state").text)
    assert list(json.loads(ask(page, "How many legs has a spider?"))) == ["n"]
    assert page.driver.find_elements("css selector", "#messages .token.forced")


def test_a_program_runs_and_its_lanes_show_where_tokens_come_from(page: Page) -> None:
    page.open("program")
    for number, lanes in ((1, 1), (2, 4), (3, 1), (4, 3)):
        page.find(f"#example option:nth-child({number})").click()
        page.find("#run").click()
        page.until(lambda: "steps" in page.find("#program-state").text)
        assert len(page.driver.find_elements("css selector", ".lane")) == lanes
        assert page.texts(".lane .bad") == []
    assert page.driver.find_elements("css selector", ".lane .token.cached")
    assert page.driver.find_elements("css selector", ".lane .token.selected")
    page.type("#source", 's += "a" + gen("x"', clear=True)
    page.until(lambda: "is expected" in page.find("#program-state").text)
    page.type("#source", 's += t["x"]', clear=True)
    page.until(lambda: "line 1: there is no sequence t; there are s" in page.find("#program-state").text)
    page.type("#source", 's += "a" + gen("x", max_tokens=2, regex="[")', clear=True)
    page.find("#run").click()
    page.until(lambda: page.texts(".lane .bad"))


def test_the_tree_grows_and_shrinks(page: Page, url: str) -> None:
    page.open("cache")
    httpx.post(f"{url}/flush_cache", timeout=WAIT_S).raise_for_status()
    page.until(lambda: page.find("#cache-state").text.startswith("0 pieces"))
    body = {"prompt": ["The oak is a tree", "The oak is a bird"], "max_tokens": 4}
    httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).raise_for_status()
    page.until(lambda: any("The oak is" in row for row in page.texts("#pieces tbody td:first-child")))
    page.find("#tree").send_keys("")
    right, enter, escape = "\ue014", "\ue007", "\ue00c"
    page.driver.execute_script("document.getElementById('tree').focus()")
    page.press(right, right)
    page.until(lambda: "The oak is" in page.find("#node").text)
    page.press(enter, escape)
    httpx.post(f"{url}/flush_cache", timeout=WAIT_S).raise_for_status()
    page.until(lambda: page.find("#cache-state").text.startswith("0 pieces"))


def test_five_thousand_pieces_are_drawn_without_a_stutter(page: Page) -> None:
    page.open("cache")
    page.find("#freeze").click()
    nodes = page.driver.execute_async_script(
        """
        const done = arguments[arguments.length - 1];
        import(new URL("page/cache.js", location.href)).then((cache) => {
          const nodes = [];
          for (let i = 0; i < 5000; i++) {
            const parent = i < 50 ? -1 : Math.floor(i / 7);
            nodes.push([i, parent, 1 + (i * 37) % 300, i % 3, i % 50 === 0, i % 9, i, `piece ${i}`, []]);
          }
          const slots = { total: 1e6, free: 5e5, cached: 5e5, locked: 10, leased: 0 };
          cache.show({ roots: [""], nodes, num_hidden: 0, slots, evicted_tokens: { space: 0, flush: 0 } });
          const times = [...Array(9)].map(() => cache.draw()).sort((a, b) => a - b);
          window.drawMs = times[4];
          done(document.getElementById("cache-state").textContent);
        }, (error) => done(String(error)));
        """
    )
    assert nodes.startswith("5,000 pieces"), nodes
    logging.getLogger(__name__).info("one drawing: %.1f ms", page.driver.execute_script("return window.drawMs"))


def test_the_engine_s_numbers_move(page: Page, url: str) -> None:
    page.open("engine")
    httpx.post(
        f"{url}/v1/completions", json={"prompt": "One two three", "max_tokens": 20}, timeout=WAIT_S
    ).raise_for_status()
    page.until(lambda: page.find("#steps-text").text.startswith("The last"))
    assert page.texts("#replicas tbody tr")[0].split()[1] == "ready"
    page.until(lambda: page.find("#plot-tokens path").get_attribute("d"))
    assert "slots in use" in page.find("#pool").get_attribute("aria-label")


def test_dark_and_light_can_be_chosen_and_stay(page: Page) -> None:
    def back() -> str:
        return page.find("body").value_of_css_property("background-color")

    first = back()
    page.find("#theme").click()
    page.until(lambda: back() != first)
    second = back()
    page.driver.refresh()
    page.until(lambda: back() == second)


def test_it_works_by_keyboard_alone(page: Page) -> None:
    tab, right, left, end = "\ue004", "\ue014", "\ue012", "\ue010"

    def focused() -> str:
        return page.driver.execute_script("return document.activeElement.id")

    for _ in range(3):
        page.press(tab)
        if focused() == "tab-chat":
            break
    assert focused() == "tab-chat"
    page.press(right)
    assert focused() == "tab-program" and page.find("#program").is_displayed()
    page.press(end)
    assert focused() == "tab-engine" and page.find("#engine").is_displayed()
    page.press(right)
    assert focused() == "tab-chat" and page.find("#chat").is_displayed()
    page.press(left)
    assert focused() == "tab-engine"


def test_a_phone_s_width_is_enough(url: str, tmp_path: Path) -> None:
    with browsing(url, tmp_path, width=360, height=740) as page:
        page.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True},
        )
        for tab in ("chat", "program", "cache", "engine"):
            page.open(tab)
            assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 360, tab


def test_a_key_is_asked_for_once_and_used(smollm2_path: Path, tmp_path: Path) -> None:
    with served(smollm2_path, "sesame") as url, browsing(url, tmp_path) as page:
        page.until(lambda: page.find("#key-dialog").is_displayed())
        page.type("#key", "sesame\n")
        page.until(lambda: page.find("#model").text == "smollm2")
        page.open("engine")
        page.until(lambda: page.texts("#tiles div"))
        assert not page.find("#key-dialog").is_displayed()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault(page: Page, theme: str) -> None:
    place = os.environ.get("PHLOEM_AXE", "")
    if not Path(place).is_file():
        pytest.skip("PHLOEM_AXE names no axe.min.js")
    page.driver.execute_script("localStorage.setItem('phloem-theme', arguments[0])", theme)
    page.driver.refresh()
    page.type("#temperature", "0", clear=True)
    ask(page, "Name a tree.")
    found = []
    for tab in ("chat", "program", "cache", "engine"):
        page.open(tab)
        if tab == "program":
            page.find("#run").click()
            page.until(lambda: "steps" in page.find("#program-state").text)
        # through the debugger, which the page's own policy does not bind
        page.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": Path(place).read_text()})
        result = page.driver.execute_async_script(
            "const done = arguments[arguments.length - 1]; axe.run().then((found) => done(found.violations));"
        )
        found += [(tab, one["id"], one["nodes"][0]["html"]) for one in result if one["impact"] in SERIOUS]
    assert found == []


def test_the_notation_s_rules_hold() -> None:
    """The compiler of programs alone, in node: what it makes, and what it refuses with its line."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    from phloem.runtime.server import page as package

    script = Path(__file__).parent / "notation_test.mjs"
    done = subprocess.run(
        [node, str(script), str(Path(package.__file__).parent / "notation.js")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
