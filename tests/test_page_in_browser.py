"""The page as a real browser draws it: Debian's Chromium, headless."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from asyncrl.observe.page.shape import Page
from screenshots import CHROMIUM, DRIVER, look, open_browser
from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from shown_pages import HOSTILE, make_run, make_shown_page
from test_observe_page import make_run as write_run

from asyncrl.observe.page.render import render
from asyncrl.observe.page.watch import LivePage, make_watch_app

pytestmark = pytest.mark.slow
WIDTHS = (400, 900, 1600)
AT_MOST_S = 60
KEY = "a-key"
FIXED = [f"fixed-{number}" for number in range(6)]
NO_VERDICT = {
    "ended": "",
    "headline": "No step has ended yet.",
    "learning": [],
    "health": None,
    "speed": [],
    "reward_first": None,
    "reward_last": None,
    "reward_noise": None,
    "num_recent": 0,
    "trend": "unknown",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    if not (CHROMIUM.exists() and DRIVER.exists()):
        why = "no Chromium here: apt-get install chromium chromium-driver"
        assert os.environ.get("ASYNCRL_REQUIRE_BROWSER", "0") != "1", why
        pytest.skip(why)
    with open_browser() as opened:
        yield opened


def show(browser: Chrome, folder: Path, page: Page, width: int = 1600, **how: Any) -> None:
    look(browser, width, 1000, **how)
    (folder / "page.html").write_text(render(page), encoding="utf-8")
    browser.get((folder / "page.html").as_uri())


def ask(browser: Chrome, what: str) -> Any:
    return browser.execute_script(f"return {what}")


def is_well(browser: Chrome) -> None:
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    assert ask(browser, "asyncrlPage.errors()") == []
    assert ask(browser, "window.wasHostile") is None


def chart(browser: Chrome, name: str) -> dict[str, Any]:
    return next(each for each in ask(browser, "asyncrlPage.charts()") if each["id"] == name)


def all_hostile(value: Any) -> Any:
    """The same with something hostile at the end of each text."""
    if isinstance(value, Mapping):
        return {key: each if key in ("kind", "state") else all_hostile(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [all_hostile(each) for each in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) else value


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_dark", [False, True])
def test_charts_have_points_at_every_width(
    browser: Chrome, tmp_path: Path, width: int, is_dark: bool
) -> None:
    runs = make_run(), make_run("slower", 90, seed=3)
    for page in (make_shown_page(), make_shown_page(*runs)):
        show(browser, tmp_path, page, width, is_dark=is_dark)
        drawn = {each["id"]: each["points"] for each in ask(browser, "asyncrlPage.charts()")}
        assert drawn.keys() == {"reward", "staleness", "step-times", *FIXED}
        assert all(num > 0 for points in drawn.values() for num in points)
        assert ask(browser, "asyncrlPage.timeline().spans") == len(page["runs"][0]["timeline"]["spans"])
        assert ask(browser, "document.documentElement.scrollWidth") <= width
        is_well(browser)


def test_a_run_without_steps_says_what_is_missing(browser: Chrome, tmp_path: Path) -> None:
    run = make_run(num_steps=0)
    nothing: Any = {"tiles": [], "failures": [], "curves": {}, "settings": []}
    nothing |= {"verdict": NO_VERDICT, "evaluations": []}
    show(browser, tmp_path, make_shown_page({**run, **nothing}))
    empty = [each.text for each in browser.find_elements(By.CSS_SELECTOR, ".empty")]
    assert len(empty) == 18
    assert any("add a section to the config" in text for text in empty), "an evaluation"
    assert not browser.find_element(By.ID, "failures").is_displayed()
    assert all(len(text) > 15 for text in empty)
    is_well(browser)
    show(browser, tmp_path, {**make_shown_page(), "runs": []})
    assert "no run" in browser.find_element(By.ID, "notes").text
    is_well(browser)


@pytest.mark.parametrize("width", [400, 1600])
def test_long_words_and_odd_values_neither_break_the_page_nor_widen_it(
    browser: Chrome, tmp_path: Path, width: int
) -> None:
    run: Any = make_run("n" * 200, 4)
    first, second, *_ = run["samples"]
    strange = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "x"}]},
        {"content": None},
    ]
    run |= {
        "verdict": {**run["verdict"], "headline": "w" * 300, "health": ["w" * 300], "reward_noise": None},
        "tiles": [{"label": "x" * 80, "value": "v" * 60, "note": "n" * 200}],
        "curves": {"reward/mean": {"mean": [None] * 4}, "large": {"mean": [1e308, -1e308, 1e-300, None]}},
        "gauges": {},
        "timeline": {
            **run["timeline"],
            "spans": [(0, 0, 5.0, 5.0, ""), (99, 0, 1, 2, ""), (0, 99, 1, 2, "")],
        },
        "samples": [
            {**first, "parts": [], "messages": strange, "reward": None, "metrics": {}},
            {**second, "parts": second["parts"][:1]},
        ],
    }
    show(browser, tmp_path, make_shown_page(run), width)
    for button in browser.find_elements(By.CSS_SELECTOR, "button.sample"):
        button.send_keys(Keys.ENTER)
        assert ask(browser, "asyncrlPage.sample()") == button.get_attribute("data-key")
    assert ask(browser, "document.documentElement.scrollWidth") <= width
    is_well(browser)


def test_what_a_model_wrote_stays_text(browser: Chrome, tmp_path: Path) -> None:
    page: Any = all_hostile(make_shown_page(make_run(num_steps=20), make_run("other", 20)))
    show(browser, tmp_path, page)
    parts = browser.find_elements(By.CSS_SELECTOR, "#sample .turn.model pre")
    assert HOSTILE in str(parts[0].get_property("textContent"))
    assert HOSTILE in browser.find_element(By.ID, "headline").text
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main script") == []
    is_well(browser)


def test_control_characters_are_written_out_and_turn_no_text_around(browser: Chrome, tmp_path: Path) -> None:
    run, told = make_run(num_steps=3), "1 \u202e2 + 3\u2066 \x1b[2J\x00 \t\n \x9b"
    run["samples"][-1]["answer"], run["verdict"]["headline"] = told, told
    for sample in run["samples"]:
        sample["messages"] = [{"role": "user", "content": told}]
    show(browser, tmp_path, make_shown_page(run))
    for place in ("#sample .turn pre", "#headline"):
        seen = browser.find_element(By.CSS_SELECTOR, place).get_property("textContent")
        assert seen == "1 \\u202e2 + 3\\u2066 \\x1b[2J\\x00 \t\n \\x9b"
    is_well(browser)


def test_a_click_on_a_sample_shows_it(browser: Chrome, tmp_path: Path) -> None:
    page = make_shown_page()
    show(browser, tmp_path, page)
    before = ask(browser, "asyncrlPage.sample()")
    browser.find_elements(By.CSS_SELECTOR, "button.sample.worst")[1].click()
    after = ask(browser, "asyncrlPage.sample()")
    assert after != before
    assert f"Step {after.split('/')[0]}," in browser.find_element(By.CSS_SELECTOR, "#sample h3").text
    kind = browser.find_element(By.CSS_SELECTOR, "select[data-key=kind]")
    kind.find_element(By.CSS_SELECTOR, "option[value=failed]").click()
    badges = browser.find_elements(By.CSS_SELECTOR, "#sample-list .badge:first-child")
    assert {each.text for each in badges} == {"failed"}
    assert "the reward function raised" in browser.find_element(By.ID, "sample").text
    kind.find_element(By.CSS_SELECTOR, "option[value='']").click()
    sort = browser.find_element(By.CSS_SELECTOR, "select[data-key=sort]")
    sort.find_element(By.CSS_SELECTOR, "option[value=low]").click()
    first = browser.find_element(By.CSS_SELECTOR, "#sample-list .reward")
    assert first.text == f"reward {min(each['reward'] or 0.0 for each in page['runs'][0]['samples']):.0f}"
    is_well(browser)


def test_the_page_answers_did_it_learn_then_is_it_healthy_then_how_fast(
    browser: Chrome, tmp_path: Path
) -> None:
    page = make_shown_page()
    show(browser, tmp_path, page)
    assert browser.find_element(By.TAG_NAME, "h1").text.startswith("Learned: reward rose")
    rows = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "#verdict .row")]
    assert [row.split("\n")[0] for row in rows] == ["Learning", "Health", "Speed"]
    assert "0.081\n→\n0.944\n± 0.010" in rows[0]
    assert "special tokens" in rows[1]
    assert ask(browser, "asyncrlPage.timeline().slots") == [16, 16], "lanes are as high as the slots"
    page["runs"][0]["verdict"]["health"] = []
    show(browser, tmp_path, page)
    assert browser.find_element(By.CSS_SELECTOR, "#verdict .fine").text == "Nothing unusual."
    is_well(browser)


def test_links_lead_to_a_step_and_to_a_sample(browser: Chrome, tmp_path: Path) -> None:
    show(browser, tmp_path, make_shown_page())
    address = (tmp_path / "page.html").as_uri()
    browser.get("about:blank")
    browser.get(f"{address}#step=42")
    assert ask(browser, "asyncrlPage.step()") == 42
    tools = browser.find_element(By.ID, "step-tools")
    assert tools.text.startswith("Step 42")
    tools.find_elements(By.TAG_NAME, "button")[0].click()
    steps = {each.text for each in browser.find_elements(By.CSS_SELECTOR, "#sample-list .at")}
    assert steps == {"step 42"} or steps == {"step 43"}, "the nearest step with samples"
    browser.execute_script("arguments[0].click()", tools.find_elements(By.TAG_NAME, "button")[1])
    shown = ask(browser, "asyncrlPage.timeline()")
    assert shown["to"] - shown["from"] < 10
    key = ask(browser, "asyncrlPage.runs() && asyncrlPage.sample()")
    browser.get("about:blank")
    browser.get(f"{address}#sample={key}")
    assert ask(browser, "asyncrlPage.sample()") == key
    assert "Copy link" in browser.find_element(By.CSS_SELECTOR, "#sample h3").text
    over = browser.find_element(By.CSS_SELECTOR, "#reward .u-over")
    ActionChains(browser).move_to_element(over).click().perform()
    step = ask(browser, "asyncrlPage.step()")
    assert 30 < step < 90
    assert ask(browser, "location.hash") == f"#step={step}"
    is_well(browser)


def test_the_time_line_zooms_by_drag_wheel_and_keys(browser: Chrome, tmp_path: Path) -> None:
    show(browser, tmp_path, make_shown_page())
    canvas = browser.find_element(By.CSS_SELECTOR, "#timeline canvas")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)

    def seen() -> tuple[float, float]:
        told = ask(browser, "asyncrlPage.timeline()")
        return told["from"], told["to"]

    whole = seen()
    ActionChains(browser).move_to_element_with_offset(canvas, -200, 0).click_and_hold().move_by_offset(
        300, 0
    ).release().perform()
    dragged = seen()
    assert whole[0] < dragged[0] < dragged[1] < whole[1]
    canvas.send_keys("+")
    assert seen()[1] - seen()[0] == pytest.approx((dragged[1] - dragged[0]) / 2)
    canvas.send_keys(Keys.ARROW_RIGHT)
    assert seen()[0] > dragged[0]
    zoomed = seen()
    browser.execute_script(
        "arguments[0].dispatchEvent(new WheelEvent('wheel', {deltaY: -200, offsetX: 500, cancelable: true}))",
        canvas,
    )
    assert seen()[1] - seen()[0] < zoomed[1] - zoomed[0]
    canvas.send_keys("0")
    assert seen() == whole
    canvas.send_keys(Keys.ESCAPE, ".")
    assert "before step 1" in browser.find_element(By.CSS_SELECTOR, ".tip").text
    kinds = browser.find_elements(By.CSS_SELECTOR, "#timeline button.key")
    kinds[0].click()
    first = browser.find_elements(By.CSS_SELECTOR, "#timeline button.key")[0]
    assert first.get_attribute("aria-pressed") == "false"
    is_well(browser)


def test_a_chart_zooms_by_drag_and_keys_and_changes_its_axis(browser: Chrome, tmp_path: Path) -> None:
    show(browser, tmp_path, make_shown_page())
    over = browser.find_element(By.CSS_SELECTOR, "#reward .u-over")
    ActionChains(browser).move_to_element_with_offset(over, -100, 0).click_and_hold().move_by_offset(
        150, 0
    ).release().perform()
    zoomed = chart(browser, "reward")
    assert zoomed["isZoomed"]
    assert 0 < zoomed["from"] < zoomed["to"] < 120
    browser.find_element(By.CSS_SELECTOR, "#reward .chart-head button").click()
    assert (chart(browser, "reward")["from"], chart(browser, "reward")["to"]) == (0, 120)
    plot = browser.find_element(By.CSS_SELECTOR, "#reward .plot")
    plot.send_keys("+")
    assert chart(browser, "reward")["to"] - chart(browser, "reward")["from"] == pytest.approx(120 / 2)
    plot.send_keys("0")
    browser.find_element(By.CSS_SELECTOR, "#axis input[value=time] + span").click()
    assert chart(browser, "reward")["to"] > 150
    is_well(browser)


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(browser: Chrome, tmp_path: Path) -> None:
    show(browser, tmp_path, make_shown_page(make_run(num_steps=6)))
    assert (
        ask(
            browser,
            'document.querySelectorAll(\'[tabindex]:not([tabindex="0"]):not([tabindex="-1"])\').length',
        )
        == 0
    )
    reached = []
    for _ in range(160):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        told = ask(
            browser,
            "((node) => [node.tagName, node.id || node.closest('[id]')?.id || '', "
            "node.matches(':focus-visible')])(document.activeElement)",
        )
        if told[0] == "BODY":
            break
        assert told[2], told
        reached.append(told[1])
    order = list(dict.fromkeys(reached))
    wanted = ["nav", "warnings", "axis", "reward", *FIXED, "evaluations", "sample-tools", "sample-list"]
    wanted += ["failures", "step-times", "staleness", "timeline", "metric-filter", "config"]
    assert [name for name in order if name in wanted] == wanted


def test_a_metric_and_a_setting_are_found(browser: Chrome, tmp_path: Path) -> None:
    show(browser, tmp_path, make_shown_page())
    browser.find_element(By.ID, "metric-filter").send_keys("host_mem")
    assert "1 of 13 metrics" in browser.find_element(By.ID, "metric-tools").text
    (cell,) = browser.find_elements(By.CSS_SELECTOR, "#metric-grid .chart")
    WebDriverWait(browser, AT_MOST_S).until(lambda _: "MiB" in cell.text)
    assert "peak resident memory" in cell.text
    rows = "#config tbody tr"
    assert len(browser.find_elements(By.CSS_SELECTOR, rows)) == 4
    browser.find_element(By.CSS_SELECTOR, "#config input[type=checkbox]").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, rows)) == 7
    assert len(browser.find_elements(By.CSS_SELECTOR, f"{rows}.differs")) == 4
    browser.find_element(By.CSS_SELECTOR, "#config input[type=search]").send_keys("temperature")
    assert len(browser.find_elements(By.CSS_SELECTOR, rows)) == 1
    is_well(browser)


def test_another_run_is_shown_in_detail_when_it_is_chosen(browser: Chrome, tmp_path: Path) -> None:
    other = make_run("other", 30, seed=3)
    other["verdict"]["headline"] = "The other one."
    show(browser, tmp_path, make_shown_page(make_run(), other))
    assert browser.find_element(By.ID, "differences").is_displayed()
    browser.find_elements(By.CSS_SELECTOR, ".runs button")[1].click()
    assert "The other one." in browser.find_element(By.ID, "verdict").text
    is_well(browser)


class Served:
    """The live page of a run directory, in a thread with a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.live = LivePage([folder])
        self.loop, self.url = asyncio.new_event_loop(), ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(AT_MOST_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(AT_MOST_S)

    def _run(self) -> None:
        self._task = self.loop.create_task(self._serve())
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._wait())

    async def _wait(self) -> None:
        await asyncio.wait([self._task])

    async def _serve(self) -> None:
        runner = web.AppRunner(make_watch_app(self.live, KEY), shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        self._ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def test_changes_arrive_in_an_open_page(browser: Chrome, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 5)
    look(browser, 1600, 1000)
    wait = WebDriverWait(browser, AT_MOST_S, poll_frequency=0.05)
    with Served(folder) as served:
        browser.get(f"{served.url}?key={KEY}")
        wait.until(lambda _: browser.find_element(By.ID, "live").text.endswith("live"))
        chosen = ask(browser, "asyncrlPage.sample()")
        write_run(folder, 9)
        wait.until(lambda _: ask(browser, "asyncrlPage.runs()[0]?.steps") == 9)
        assert chart(browser, "reward")["to"] == 9
        assert ask(browser, "asyncrlPage.sample()") == chosen
        is_well(browser)
    browser.get("about:blank")
