"""The page as a real browser draws it: Debian's Chromium, headless."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_cases import HOSTILE, make_run, make_sample, page_of
from screenshots import CHROMIUM, DRIVER, look, open_browser
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from asyncrl.observe.report_page import render
from asyncrl.observe.run_dir import append_lines

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


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
    search = browser.find_element(By.CSS_SELECTOR, "#sample-tools input")
    search.send_keys("word200.")
    count = browser.find_element(By.ID, "sample-count")
    wait = WebDriverWait(browser, 60)
    wait.until(lambda _: count.is_displayed() and count.text == "1 of 300 samples")
    assert ask(browser, "samples.all.map(keyOf)[200]") == "200/0/0/best"
    # A link to a sample that is unpacked later.
    browser.get((tmp_path / "page.html").as_uri() + "#sample=150/0/0/best")
    wait.until(lambda _: ask(browser, "samples.key") == "150/0/0/best")
    is_well(browser)


def test_timeline_and_tabs_are_readable(browser: Chrome, tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", 20))
    show(browser, tmp_path, page, 400)
    keys = browser.find_elements(By.CSS_SELECTOR, "#timeline .tools ~ .legend .key")
    assert [key.text for key in keys] == ["train", "wait", "weights"]
    others = (
        "timeline.kinds.filter(kind => groupOf(kind) === OTHER).map(kind => kind.name)"
    )
    assert {*ask(browser, others)} == {"pack", "journal", "record", "start", "down"}
    pictures = ask(browser, "[...GROUPS, OTHER].map(each => tileOf(each).toDataURL())")
    assert len({*pictures}) == 7
    assert ask(browser, "byId('nav').className") == "has-more"
    # A mean that trails, or pads with zeros, has other values.
    mean = ask(browser, "runningMean([0, 1, 2, null, 4, 5], 3)")
    assert mean == [0.5, 1, 1.5, 3, 4.5, 4.5]
    is_well(browser)


def test_reference_pages_filter_their_keys(browser: Chrome, tmp_path: Path) -> None:
    row = "<tr><td><a><code>{0}.tokens</code></a></td><td><a><code>{0}.size</code></a></td></tr>"
    rows = "".join(map(row.format, ("rollout", "trainer")))
    table = f"<table><tbody>{rows}</tbody></table>"
    script = (ROOT / "docs/site.js").read_text(encoding="utf-8")
    page = f"<div><p class=key-filter></p>{table}</div><script>{script}</script>"
    (tmp_path / "page.html").write_text(page)
    browser.get((tmp_path / "page.html").as_uri())
    browser.find_element(By.TAG_NAME, "input").send_keys("trainer si")
    body = browser.find_element(By.TAG_NAME, "body").text
    assert body.split() == ["1", "of", "2", "trainer.tokens", "trainer.size"]
