"""The page as a real browser draws it: Debian's Chromium, headless."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from screenshots import CHROMIUM, DRIVER, look, open_browser
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait
from test_observe_page import HOSTILE, make_run, make_sample, page_of

from asyncrl.observe.report_page import render
from asyncrl.observe.run_dir import append_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    if not (CHROMIUM.exists() and DRIVER.exists()):
        why = "no Chromium here: apt-get install chromium chromium-driver"
        assert os.environ.get("ASYNCRL_REQUIRE_BROWSER", "0") != "1", why
        pytest.skip(why)
    with open_browser() as opened:
        yield opened


def show(browser: Chrome, folder: Path, page: Any, width: int = 1600) -> None:
    look(browser, width, 1000)
    (folder / "page.html").write_text(render(page), encoding="utf-8")
    browser.get((folder / "page.html").as_uri())


def ask(browser: Chrome, what: str) -> Any:
    return browser.execute_script(f"return {what}")


def is_well(browser: Chrome) -> None:
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    assert ask(browser, "asyncrlPage.errors()") == []


def test_the_page_draws_all_parts(browser: Chrome, tmp_path: Path) -> None:
    for page in (page_of(), page_of(make_run(tmp_path / "empty", 0))):
        show(browser, tmp_path, page)
        is_well(browser)
    first = make_run(tmp_path / "first", 60)
    second = make_run(
        tmp_path / "second", 20, state="failed", buffer={"max_staleness": 4}
    )
    for page in (page_of(first), page_of(first, second)):
        show(browser, tmp_path, page, 400)
        drawn = {
            each["id"]: each["points"] for each in ask(browser, "asyncrlPage.charts()")
        }
        assert all(num > 0 for points in drawn.values() for num in points)
        assert ask(browser, "asyncrlPage.timeline().spans") == len(
            page["runs"][0]["timeline"]["spans"]
        )
        assert ask(browser, "document.documentElement.scrollWidth") <= 400
        is_well(browser)
    headline = browser.find_element(By.TAG_NAME, "h1").text
    assert (
        headline.startswith("Learned: reward rose"),
        headline.endswith(" (first)"),
    ) == (True, True)
    assert browser.find_element(
        By.CSS_SELECTOR, "#metric-constant summary"
    ).text.endswith("did not change")
    browser.find_elements(By.CSS_SELECTOR, ".runs button")[1].click()
    assert "the disk is full" in browser.find_element(By.ID, "headline").text
    browser.find_element(By.CSS_SELECTOR, "#sample input[value=version]").click()
    token = browser.find_element(By.CSS_SELECTOR, "#sample .turn.model pre span")
    assert token.value_of_css_property("background-color") != "rgba(0, 0, 0, 0)"
    browser.find_element(By.CSS_SELECTOR, ".to-page").click()
    assert not browser.find_element(By.ID, "verdict").is_displayed()
    is_well(browser)


def test_hostile_text_stays_text(browser: Chrome, tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", 20))
    page["runs"][0]["verdict"]["headline"] = HOSTILE
    show(browser, tmp_path, page)
    texts = []
    for button in browser.find_elements(By.CSS_SELECTOR, "button.sample"):
        button.click()
        parts = browser.find_elements(By.CSS_SELECTOR, "#sample .turn.model pre")
        texts += [str(part.get_property("textContent")) for part in parts]
    assert any("</script><script>alert(1)" in text for text in texts)
    assert "1 \\u202e2 + 3 \\x1b[2J\\x00" in texts, "control characters are written out"
    assert "alert(1)" in browser.find_element(By.ID, "headline").text
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main script") == []
    is_well(browser)


def test_search_finds_each_sample_of_the_run(browser: Chrome, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", 8)
    lines = [make_sample(step=step, text=f"word{step}.") for step in range(3, 300)]
    append_lines(run_dir / "samples.jsonl", lines)
    show(browser, tmp_path, page_of(run_dir))
    WebDriverWait(browser, 60).until(
        lambda _: ask(browser, "asyncrlPage.numSamples()") == 300
    )
    count = browser.find_element(By.ID, "sample-count")
    assert count.text == "300 of 300 samples"
    for step in (3, 101, 200, 299):
        search = browser.find_element(By.CSS_SELECTOR, "#sample-tools input")
        search.clear()
        search.send_keys(f"word{step}.")
        assert count.text == "1 of 300 samples"
        shown = browser.find_element(By.CSS_SELECTOR, "#sample .turn.model pre")
        assert shown.text == f"word{step}."
    browser.get((tmp_path / "page.html").as_uri() + "#sample=150/0/0/best")
    WebDriverWait(browser, 60).until(
        lambda _: ask(browser, "asyncrlPage.sample()") == "150/0/0/best"
    )
    is_well(browser)


def test_timeline_and_tabs_are_readable(browser: Chrome, tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", 20))
    show(browser, tmp_path, page, 400)
    keys = browser.find_elements(By.CSS_SELECTOR, "#timeline .tools ~ .legend .key")
    assert [key.text for key in keys] == ["train", "wait", "weights"]
    kinds = [kind["name"] for kind in page["runs"][0]["timeline"]["kinds"]]
    groups = ask(browser, f"{kinds}.map(name => groupOf({{name}}).name)")
    others = {
        kind for kind, group in zip(kinds, groups, strict=True) if group == "other"
    }
    assert others == {"journal", "record", "start", "down"}
    assert len(set(groups)) == 7
    swatches = "[...GROUPS, OTHER].map(group => tileOf(group).toDataURL())"
    assert len(set(ask(browser, swatches))) == 7
    nav = browser.find_element(By.ID, "nav")
    assert nav.get_attribute("class") == "has-more"
    browser.execute_script("arguments[0].scrollLeft = 1000", nav)
    WebDriverWait(browser, 60).until(lambda _: not nav.get_attribute("class"))
    # A mean that trails, or pads with zeros, has other values.
    mean = ask(browser, "runningMean([0, 1, 2, null, 4, 5], 3)")
    assert mean == [0.5, 1, 1.5, 3, 4.5, 4.5]
    is_well(browser)
