"""The page: what is in it, and how it behaves in a browser that is cut off from the network."""

from __future__ import annotations

import functools
import html
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hp_compile
from hp_compile.page import data, render
from hyper_parallel.errors import HPCompileError
from tests.cost.plans import make_plan, plan_on

pytest.importorskip("bokeh", reason="the extra `page` is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


TP = ("dp_shard", "tp")


class FewHeads(nn.Module):
    """One key head, and a softmax over cut features, which has no rule for parts."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_key_value_heads=heads)
        self._tp_plan = {"*_proj": "colwise", "o": "rowwise"}
        self.k_proj, self.q_proj = nn.Linear(6, 8), nn.Linear(6, 8)
        self.o = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q_proj(x).softmax(-1)) + self.k_proj(x).sum()


@functools.cache
def noted(heads: int = 1) -> hp_compile.Plan:
    """A plan with notes: two with one key head, one with two."""
    args = (torch.randn(4, 6),)
    return make_plan(FewHeads(heads), args, (2, 2), names=TP, tp_plan="auto", dynamic=False)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan on 2×4 beside the same model on 2×2, as a file; `HP_PAGE` names one to keep."""
    path = Path(os.environ.get("HP_PAGE", tmp_path_factory.mktemp("page") / "plan.html"))
    path.write_text(render(plan_on((2, 4), "lm"), plan_on((2, 2), "lm"), "h100"))
    return path


# ------------------------------------------------------------------ what is in it


def test_one_file_without_network(page: Path) -> None:
    text = page.read_text()
    assert len(text) < 2_000_000
    assert not re.search(r"<(script|img|iframe)[^>]+src=", text)
    assert re.findall(r"<link[^>]*>", text) == ['<link rel="icon" href="data:,">']
    assert "@import" not in text and "url(http" not in text


def test_every_parameter_collective_and_node_is_there(page: Path) -> None:
    text = page.read_text()
    plan = plan_on((2, 4), "lm")
    for fqn in plan.params:
        assert f">{fqn}<" in text.replace("<del>", "<")
    for c in plan.collectives:
        assert f"{c.nbytes:,}" in text
    for gm in plan.graphs.values():
        for node in list(gm.graph.nodes)[:-1]:
            assert node.name in text
    assert plan.fingerprint in text and plan_on((2, 2), "lm").fingerprint in text


def test_text_is_escaped_and_a_page_without_another_plan_has_no_difference() -> None:
    text = render(plan_on((1, 2), "tiny"))
    body = text.split("<main>")[1].split("</main>")[0]
    assert "&lt;built-in function getitem&gt;" in body and "<built-in" not in body
    assert 'id="difference"' not in body and "only-changed" not in body


def test_notes() -> None:
    plan = noted()
    whole, gathered = plan.notes
    assert (
        "stay whole" in whole and "softmax" in gathered and "mixes what the ranks hold" in gathered
    )
    body = html.unescape(render(plan).split("<main>")[1])
    assert body.count("<li>") == 2
    assert f"<li>{whole}</li>" in body and f"<li>{gathered}</li>" in body
    assert data.note_rows(plan) == data.note_rows(plan, plan) == [("", whole), ("", gathered)]
    assert data.note_rows(noted(2), plan) == [("", gathered), ("removed", whole)]
    assert data.note_rows(plan, noted(2)) == [("added", whole), ("", gathered)]
    assert "only in the plan before" in render(noted(2), plan)
    assert 'id="notes"' not in render(plan_on((1, 2), "tiny"))


def test_rows_against_another_plan() -> None:
    here, there = plan_on((2, 4), "tiny"), plan_on((2, 2), "tiny")
    rows = data.parameter_rows(here, there)
    assert {r.mark for r in rows} == {"changed"}
    assert {r.mark for r in data.parameter_rows(here, here)} == {""}
    marks = {r.mark for r in data.parameter_rows(here, plan_on((2, 2), "uneven"))}
    assert marks == {"added", "removed"}
    assert data.difference(here, here) == []
    kinds = {kind for kind, _ in data.difference(here, there)}
    assert kinds == {"+", "-", "@", " "}


def test_modules_hold_every_line_once() -> None:
    plan = plan_on((2, 2), "tiny")
    found = data.modules(plan)
    lines = sum(len(m.lines) for m in found)
    outputs = sum(len(list(gm.graph.nodes)[-1].args[0]) for gm in plan.graphs.values())
    assert lines == sum(len(gm.graph.nodes) - 1 for gm in plan.graphs.values()) + outputs
    assert {"blocks.0.up", "blocks.1.down", "(inputs)"} <= {m.name for m in found}


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (1234, "1.23 K"), (5e15, "5 P"), (12.0, "12")]
)
def test_quantities(number: float, text: str) -> None:
    assert data.quantity(number) == text


def test_a_plan_without_program_and_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_on((2, 2), "tiny")
    bare = hp_compile.Plan(plan.layout, plan.policy, plan.params, None, None)
    with pytest.raises(hp_compile.CaptureError, match="without example inputs"):
        render(bare)
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(HPCompileError, match=r"pip install 'hyper-parallel\[page\]'"):
        render(plan)


# ------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Any]:
    """Headless Chromium on the page, without a network."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium: install the Debian packages chromium and chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "no-first-run",
        "window-size=1400,1000",
        "host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(page.as_uri())
        yield driver
    finally:
        driver.quit()


def _visible(browser: Any, column: int = 0) -> list[str]:
    script = """return [...document.querySelectorAll('#parameter-table tbody tr')].filter(r => !r.hidden)
        .map(r => r.cells[arguments[0]].dataset.key)"""
    return list(browser.execute_script(script, column))


def _type(browser: Any, text: str) -> None:
    field = browser.find_element("id", "filter")
    field.clear()
    field.send_keys(text or " ")


def _wait(browser: Any, script: str) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 30).until(lambda b: b.execute_script(script))


def test_it_opens_and_draws(browser: Any) -> None:
    assert "plan" in browser.title
    _wait(browser, "return Bokeh.documents.length && Bokeh.documents[0].is_idle")
    bars = browser.execute_script("""return Bokeh.documents[0].roots().length""")
    assert bars == 1
    height = browser.execute_script(
        "return document.querySelector('#step > div > div').getBoundingClientRect().height"
    )
    assert height > 400


def test_it_filters(browser: Any) -> None:
    plan = plan_on((2, 4), "lm")
    _type(browser, "")
    assert _visible(browser) == list(plan.params)
    _type(browser, "BLOCKS.1 mlp")
    assert _visible(browser) == [f for f in plan.params if "blocks.1" in f and "mlp" in f]
    count = browser.find_element("id", "count").text
    assert count == f"3 of {len(plan.params)}"
    _type(browser, "no such thing")
    assert _visible(browser) == []
    _type(browser, "")


def test_it_sorts(browser: Any) -> None:
    heads = browser.find_elements("css selector", "#parameter-table th button")
    heads[5].click()
    numbers = [int(n) for n in _visible(browser, 5)]
    assert numbers == sorted(numbers) and len(set(numbers)) > 2
    heads[5].click()
    assert [int(n) for n in _visible(browser, 5)] == sorted(numbers, reverse=True)
    heads[0].click()
    names = _visible(browser)
    assert names[0] == "blocks.0.attention.k.weight"
    states = [
        h.get_attribute("aria-sort")
        for h in browser.find_elements("css selector", "#parameter-table th")
    ]
    assert states == ["ascending"] + ["none"] * 7


def test_it_shows_only_what_differs(browser: Any) -> None:
    box = browser.find_element("id", "only-changed")
    box.click()
    assert len(_visible(browser)) == len(plan_on((2, 4), "lm").params)  # every shard is smaller
    assert browser.find_elements("css selector", "tr.changed del")
    box.click()


def test_it_zooms_both_plots(browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    _wait(browser, "return Bokeh.documents.length && Bokeh.documents[0].is_idle")
    ranges = """const plots = Bokeh.documents[0].roots()[0].children;
        return plots.map(p => p.x_range.end - p.x_range.start)"""
    before = browser.execute_script(ranges)
    assert before[0] == before[1] > 0
    drawing = browser.find_element("css selector", "#step > div > div")
    origin = ScrollOrigin.from_element(drawing, 0, 60)
    ActionChains(browser).scroll_from_origin(origin, 0, -600).perform()
    _wait(
        browser,
        f"{ranges.replace('return plots', 'const w = plots')}; return w[0] < {before[0]} * 0.95",
    )
    after = browser.execute_script(ranges)
    assert after[0] == after[1] < before[0]


def test_programs_open(browser: Any) -> None:
    assert not browser.find_elements("css selector", "details[open]")
    browser.find_element("id", "open-all").click()
    shut = browser.find_elements("css selector", "details:not([open])")
    assert shut == [] and "aten.mm" in browser.find_element("css selector", "#programs").text
    browser.find_element("id", "close-all").click()


def test_notes_are_seen_and_linked(browser: Any, page: Path, tmp_path: Path) -> None:
    assert not browser.find_elements("id", "notes")  # the plan has none
    path = Path(os.environ.get("HP_NOTES_PAGE", tmp_path / "notes.html"))
    path.write_text(render(noted(2), noted()))
    browser.get(path.as_uri())
    try:
        items = browser.find_elements("css selector", "#notes li")
        assert [item.get_attribute("class") for item in items] == ["", "removed"]
        assert "softmax" in items[0].text and "stay whole" in items[1].text
        assert all(item.is_displayed() and item.size["height"] > 20 for item in items)
        link = browser.find_element("css selector", "nav a[href='#notes']")
        assert link.text == "notes 1"
        link.click()
        assert browser.current_url.endswith("#notes")
        wide = "return document.documentElement.scrollWidth > window.innerWidth"
        assert not browser.execute_script(wide)
        assert [e for e in browser.get_log("browser") if e["level"] != "INFO"] == []
    finally:
        browser.get(page.as_uri())


def test_the_console_is_clean(browser: Any) -> None:
    _wait(browser, "return Bokeh.documents.length && Bokeh.documents[0].is_idle")
    assert [e for e in browser.get_log("browser") if e["level"] != "INFO"] == []
