"""The page as a real browser draws it: Debian's Chromium, headless."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from screenshots import CHROMIUM, DRIVER, look, open_browser
from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from test_observe_page import HOSTILE, make_run, page_of

from asyncrl.observe.page import render

pytestmark = pytest.mark.slow
AT_MOST_S = 60


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    if not (CHROMIUM.exists() and DRIVER.exists()):
        why = "no Chromium here: apt-get install chromium chromium-driver"
        assert os.environ.get("ASYNCRL_REQUIRE_BROWSER", "0") != "1", why
        pytest.skip(why)
    with open_browser() as opened:
        yield opened


def show(browser: Chrome, folder: Path, page: Any, width: int = 1600, **how: Any) -> None:
    look(browser, width, 1000, **how)
    (folder / "page.html").write_text(render(page), encoding="utf-8")
    browser.get((folder / "page.html").as_uri())


def ask(browser: Chrome, what: str) -> Any:
    return browser.execute_script(f"return {what}")


def is_well(browser: Chrome) -> None:
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    assert ask(browser, "asyncrlPage.errors()") == []


def chart(browser: Chrome, name: str) -> dict[str, Any]:
    return next(each for each in ask(browser, "asyncrlPage.charts()") if each["id"] == name)


@pytest.mark.parametrize(("width", "is_dark"), [(400, True), (1600, False)])
def test_the_page_draws_all_parts(browser: Chrome, tmp_path: Path, width: int, is_dark: bool) -> None:
    first = make_run(tmp_path / "first", 30)
    second = make_run(tmp_path / "second", 20, state="failed", buffer={"max_staleness": 4})
    for page in (page_of(first), page_of(first, second)):
        show(browser, tmp_path, page, width, is_dark=is_dark)
        drawn = {each["id"]: each["points"] for each in ask(browser, "asyncrlPage.charts()")}
        assert {"reward", "staleness", "fixed-0"} <= drawn.keys()
        assert all(num > 0 for points in drawn.values() for num in points)
        assert ask(browser, "asyncrlPage.timeline().spans") == len(page["runs"][0]["timeline"]["spans"])
        assert ask(browser, "document.documentElement.scrollWidth") <= width
        is_well(browser)
    assert browser.find_element(By.TAG_NAME, "h1").text.startswith("Learned: reward rose")
    rows = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "#verdict .row")]
    assert [row.split("\n")[0] for row in rows] == ["Learning", "Health", "Speed"]
    assert "buffer.max_staleness" in browser.find_element(By.ID, "differences").text
    browser.find_elements(By.CSS_SELECTOR, ".runs button")[1].click()
    assert "the disk is full" in browser.find_element(By.ID, "headline").text
    is_well(browser)


def test_a_run_without_steps_says_what_is_missing(browser: Chrome, tmp_path: Path) -> None:
    show(browser, tmp_path, page_of(make_run(tmp_path / "run", 0)))
    empty = [each.text for each in browser.find_elements(By.CSS_SELECTOR, ".empty")]
    assert any("add a section to the config" in text for text in empty), "an evaluation"
    assert "No step has ended yet." in browser.find_element(By.ID, "headline").text
    is_well(browser)
    show(browser, tmp_path, page_of())
    assert "no run" in browser.find_element(By.ID, "notes").text
    is_well(browser)


def test_hostile_text_stays_text(browser: Chrome, tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", 20))
    page["runs"][0]["verdict"]["headline"] = HOSTILE
    show(browser, tmp_path, page)
    texts = []
    for button in browser.find_elements(By.CSS_SELECTOR, "button.sample"):
        button.click()
        assert ask(browser, "asyncrlPage.sample()") == button.get_attribute("data-key")
        parts = browser.find_elements(By.CSS_SELECTOR, "#sample .turn.model pre")
        texts += [str(part.get_property("textContent")) for part in parts]
    assert any("</script><script>alert(1)" in text for text in texts)
    assert "1 \\u202e2 + 3 \\x1b[2J\\x00" in texts, "control characters are written out"
    assert "alert(1)" in browser.find_element(By.ID, "headline").text
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main script") == []
    is_well(browser)


def test_charts_and_the_timeline_zoom(browser: Chrome, tmp_path: Path) -> None:
    show(browser, tmp_path, page_of(make_run(tmp_path / "run", 120)))
    over = browser.find_element(By.CSS_SELECTOR, "#reward .u-over")
    drag = ActionChains(browser).move_to_element_with_offset(over, -100, 0).click_and_hold()
    drag.move_by_offset(150, 0).release().perform()
    assert 1 < chart(browser, "reward")["from"] < chart(browser, "reward")["to"] < 120
    browser.find_element(By.CSS_SELECTOR, "#reward .chart-head button").click()
    assert (chart(browser, "reward")["from"], chart(browser, "reward")["to"]) == (1, 120)
    before = ask(browser, "asyncrlPage.timeline()")
    browser.find_element(By.CSS_SELECTOR, "#timeline canvas").send_keys("+")
    after = ask(browser, "asyncrlPage.timeline()")
    assert after["to"] - after["from"] == pytest.approx((before["to"] - before["from"]) / 2)
    is_well(browser)


def test_changes_arrive_in_an_open_page(browser: Chrome, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 5)
    look(browser, 1600, 1000)
    wait = WebDriverWait(browser, AT_MOST_S, poll_frequency=0.05)
    command = [sys.executable, "-u", "-m", "asyncrl.cli", "watch", str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            (url,) = re.findall(r"http://\S+", process.stdout.readline())
            browser.get(url)
            wait.until(lambda _: browser.find_element(By.ID, "live").text.endswith("live"))
            chosen = ask(browser, "asyncrlPage.sample()")
            make_run(folder, 9)
            wait.until(lambda _: ask(browser, "asyncrlPage.runs()[0]?.steps") == 9)
            assert chart(browser, "reward")["to"] == 9
            assert ask(browser, "asyncrlPage.sample()") == chosen
            is_well(browser)
            browser.get("about:blank")
        finally:
            process.terminate()
