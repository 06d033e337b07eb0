"""The live page: whom it serves, when it reads, and how it ends."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from test_observe_page import embedded, make_run

from asyncrl.observe.page.watch import LivePage, is_local, make_watch_app

STATIC = Path(__file__).parent.parent / "asyncrl/observe/page/static"
LOCAL = {"Host": "127.0.0.1:80"}
Client = TestClient[Any, Any]


def with_client(live: LivePage, key: str | None, story: Callable[[Client], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with TestClient(TestServer(make_watch_app(live, key))) as client:
            await story(client)

    asyncio.run(whole())


def test_only_get_of_this_machine_is_answered(tmp_path: Path) -> None:
    live = LivePage([make_run(tmp_path / "run")])

    async def story(client: Client) -> None:
        answer = await client.get("/", headers=LOCAL)
        assert (answer.status, answer.headers["Cache-Control"]) == (200, "no-store")
        assert embedded(await answer.text())["runs"][0]["name"] == "run"
        for host in ("evil.example", "127.0.0.1.evil.example", "[::1", "10.0.0.1"):
            assert (await client.get("/", headers={"Host": host})).status == 403
        assert (await client.post("/", headers=LOCAL)).status == 405
        assert (await client.get("/../config.yaml", headers=LOCAL)).status == 404

    with_client(live, None, story)
    assert is_local("localhost")
    assert is_local("[::1]:80")
    assert is_local("::1")


def test_elsewhere_only_callers_with_the_key_are_answered(tmp_path: Path) -> None:
    live = LivePage([make_run(tmp_path / "run")])

    async def story(client: Client) -> None:
        for path in ("/", "/page.json", "/?key=wrong", "/page.json?key="):
            assert (await client.get(path)).status == 401
        assert (await client.get("/?key=secret")).status == 200
        assert (await client.get("/page.json", headers={"Authorization": "Bearer secret"})).status == 200

    with_client(live, "secret", story)


def test_a_run_may_begin_late_change_and_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.observe.page.watch.READ_SHARE", 1e9)
    folder = tmp_path / "run"
    live = LivePage([folder])

    async def story(client: Client) -> None:
        async def data(since: float = 0.0) -> Any:
            answer = await client.get(f"/page.json?since={since}", headers=LOCAL)
            return await answer.json() if answer.status == 200 else answer.status

        assert (await data())["runs"] == []
        make_run(folder, 2)
        page = await data()
        assert (len(page["runs"][0]["step"]), page["is_live"]) == (2, True)
        assert await data(page["made_s"]) == 204
        make_run(folder, 4)
        assert len((await data(page["made_s"]))["runs"][0]["step"]) == 4
        (folder / "config.yaml").write_text("no: [")
        assert len((await data())["runs"]) == 1, "the last page that could be read"
        (folder / "config.yaml").unlink()
        assert (await data())["runs"] == []

    with_client(live, None, story)


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "asyncrl.cli", "watch", str(tmp_path / "later")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{tmp_path / 'later'} is no run yet; the page waits for it\n"
        url = re.match(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert url is not None
        with urllib.request.urlopen(f"{url[0]}page.json") as answer:
            assert b'"runs": []' in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_of_the_page_have_contrast(theme: int) -> None:
    """As WCAG 2.2 asks: 4.5 for text (1.4.3), 3 for what is drawn (1.4.11)."""
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", (STATIC / "page.css").read_text())
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[theme]))

    def contrast(one: str, other: str) -> float:
        low, high = sorted(_luminance(colours[name]) for name in (one, other))
        return (high + 0.05) / (low + 0.05)

    on_paper = [(ink, back) for ink in ("ink", "muted") for back in ("paper", "card", "sunk")]
    on_back = [(name, f"{name}-back") for name in ("good", "warn", "bad", "accent")]
    for pair in [*on_paper, *on_back, ("accent", "card")]:
        assert contrast(*pair) >= 4.5, pair
    drawn = [
        *(name for name in colours if name.startswith("run-")),
        *"training generation stragglers".split(),
    ]
    drawn += "publishing turns other restart pause checkpoint commit quiet evaluation bound push".split()
    for name in drawn:
        assert contrast(name, "card") >= 3, name


def test_what_the_page_is_made_of_cannot_end_its_element_or_ask_a_network() -> None:
    own = [path for path in STATIC.iterdir() if path.suffix in (".js", ".css")]
    assert len(own) > 5
    for path in [*own, STATIC.parent / "page.html"]:
        text = path.read_text()
        if path.suffix != ".html":
            assert "</script" not in text.lower()
            assert "</style" not in text.lower()
            assert "<!--" not in text
        urls = set(re.findall(r"https?://[^\s'\")]+", text))
        assert urls <= {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}, path
        if "uPlot" not in path.name:
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), (
                path
            )
    version = re.search(r"uPlot ([\d.]+) ", (STATIC / "README.md").read_text())
    assert version
    assert f"(v{version[1]})" in (STATIC / "uPlot.iife.min.js").read_text()[:80]
    digest = hashlib.sha256((STATIC / "uPlot.iife.min.js").read_bytes()).hexdigest()
    assert digest in (STATIC / "README.md").read_text()
