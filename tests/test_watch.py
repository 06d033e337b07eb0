"""The live page: what it tells whom, when it reads, and how it ends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer
from shown_pages import make_run, make_shown_page

from asyncrl.observe.page.curves import StepsFile
from asyncrl.observe.page.shape import Page
from asyncrl.observe.page.watch import MAX_BEHIND, LivePage, change_of, make_watch_app

STATIC = Path(__file__).parent.parent / "asyncrl/observe/page/static"
LOCAL = {"Host": "127.0.0.1:80"}
Client = TestClient[Any, Any]


def reads(run_dirs: Sequence[Path]) -> Page:
    """In place of the reader: a run has as many steps as its file says."""
    page = make_shown_page(*(_run(folder) for folder in run_dirs), is_live=True)
    return {**page, "made_s": time.time()}


def _run(folder: Path) -> Any:
    num_steps = int((folder / "metrics.jsonl").read_text())
    return {**make_run(folder.name, num_steps), "run_dir": str(folder)}


def begin_run(folder: Path, num_steps: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    beside = folder / "metrics.new"  # a page may be made at any moment
    beside.write_text(f"{num_steps}")
    beside.replace(folder / "metrics.jsonl")
    (folder / "config.yaml").write_text("")
    return folder


def with_client(live: LivePage, key: str | None, story: Callable[[Client], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with TestClient(TestServer(make_watch_app(live, key))) as client:
            await story(client)

    asyncio.run(whole())


async def next_event(response: ClientResponse) -> tuple[str, Any]:
    name = (await response.content.readline()).decode().removeprefix("event: ").strip()
    data = (await response.content.readline()).decode().removeprefix("data: ")
    await response.content.readline()
    return name, json.loads(data)


def events_in(queue: asyncio.Queue[bytes]) -> list[tuple[str, Any]]:
    found = []
    while not queue.empty():
        head, data = queue.get_nowait().decode().strip().split("\n")
        found.append((head.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def applied(old: Any, change: list[Any] | None) -> Any:
    """What static/live.js does with a change."""
    match change:
        case None:
            return old
        case ["=", new]:
            return new
        case ["@", changes]:
            return [applied(each, changes.get(str(index))) for index, each in enumerate(old)]
        case ["[", left_out, kept, added]:
            return [*old[left_out : left_out + kept], *added]
        case ["{", changes, gone]:
            kept_keys = {key: value for key, value in old.items() if key not in gone}
            return kept_keys | {key: applied(old.get(key), each) for key, each in changes.items()}
    raise AssertionError(change)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"a": [1, 2]}, {"a": [1, 2, 3]}),
        ({"a": [1, 2, 3]}, {"a": [2, 3, 4]}),
        ({"a": [1, 2, 3]}, {"a": [7]}),
        ({"a": []}, {"a": [1]}),
        ({"a": [1]}, {"a": []}),
        ({"a": 1, "b": 2}, {"b": 2, "c": None}),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}),
        ({"a": [1, 1, 2]}, {"a": [1, 2, 2]}),
        ({"a": None}, {"a": {"b": 1}}),
        (make_shown_page(make_run(num_steps=5)), make_shown_page(make_run(num_steps=6))),
        (make_shown_page(make_run(num_steps=6)), make_shown_page(make_run(seed=3), make_run())),
    ],
)
def test_the_change_of_two_pages_makes_the_new_one_of_the_old_one(old: Any, new: Any) -> None:
    old, new = json.loads(json.dumps(old)), json.loads(json.dumps(new))
    assert applied(old, json.loads(json.dumps(change_of(old, new)))) == new
    assert change_of(new, new) is None


def test_a_step_more_is_told_in_few_words() -> None:
    values = [float(value) for value in range(1000)]
    assert change_of({"a": values, "b": values}, {"a": [*values, 1.5], "b": values}) == [
        "{",
        {"a": ["[", 0, 1000, [1.5]]},
        [],
    ]


def test_only_get_of_this_machine_is_answered(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        async with client.get("/", headers=LOCAL) as answer:
            assert answer.status == 200
            assert '"steps"' in await answer.text()
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in answer.headers
        for host in ("localhost:7", "[::1]:7"):
            assert (await client.get("/", headers={"Host": host})).status == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.7:80", "", "[::1", "[x]"):
            assert (await client.get("/", headers={"Host": host})).status == 403
            assert (await client.get("/events", headers={"Host": host})).status == 403
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert (await client.request(method, "/", headers=LOCAL)).status == 405
        assert (await client.get("/../etc/passwd", headers=LOCAL)).status == 404
        assert (await client.get("/events?since=x", headers=LOCAL)).status == 400

    with_client(LivePage([begin_run(tmp_path / "run")], read=reads), None, story)


def test_elsewhere_only_who_has_the_key_is_answered(tmp_path: Path) -> None:
    async def story(client: Client) -> None:
        for path in ("/", "/events", "/?key=wrong", "/?key=", "/events?key=%ff", "/nothing"):
            assert (await client.get(path)).status == 401, path
        assert (await client.get("/", headers={"Authorization": "Bearer wrong"})).status == 401
        assert (await client.get("/", headers={"Authorization": "Bearer right"})).status == 200
        first = await client.get("/?key=right", allow_redirects=False)
        assert (first.status, first.headers["Location"]) == (303, "/")
        cookie = first.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        name, value = cookie.split(";")[0].split("=")
        assert (await client.get("/", headers={"Cookie": f"{name}={value}"})).status == 200

    with_client(LivePage([begin_run(tmp_path / "run")], read=reads), "right", story)


def test_a_new_step_reaches_who_listens(tmp_path: Path) -> None:
    live = LivePage([folder := begin_run(tmp_path / "run")], read=reads)

    async def story(client: Client) -> None:
        await live.refresh()
        before = json.loads(json.dumps(live.page))
        async with client.get(f"/events?since={before['made_s']}", headers=LOCAL) as answer:
            assert await next_event(answer) == ("notes", [])
            begin_run(folder, 4)
            await live.refresh()
            name, change = await next_event(answer)
            assert name == "change"
            assert applied(before, change) == json.loads(json.dumps(live.page))
        async with client.get("/events?since=1", headers=LOCAL) as late:
            name, page = await next_event(late)
            assert (name, page["runs"][0]["step"]) == ("page", [1, 2, 3, 4])

    with_client(live, None, story)


def test_a_run_may_begin_late_and_vanish(tmp_path: Path) -> None:
    first, second = begin_run(tmp_path / "first"), tmp_path / "second"

    async def story() -> None:
        live = LivePage([first, second], read=reads)
        await live.refresh()
        assert [run["name"] for run in live.page["runs"]] == ["first"]
        assert live.notes == [
            f"{second} has no config.yaml yet: the page shows the run as soon as it begins."
        ]
        told = live.listen(live.page["made_s"], lambda: None)
        begin_run(second)
        await live.refresh()
        assert [run["name"] for run in live.page["runs"]] == ["first", "second"]
        assert [name for name, _ in events_in(told)] == ["notes", "page", "notes"]
        shutil.rmtree(first)
        begin_run(second, 9)
        await live.refresh()
        assert [len(run["step"]) for run in live.page["runs"]] == [3, 9]
        assert live.notes == [f"{first} was deleted or moved: what is shown is what was there last."]
        shutil.rmtree(second)
        await live.refresh()
        assert [len(run["step"]) for run in live.page["runs"]] == [3, 9]
        assert len(live.notes) == 2
        begin_run(first, 5)
        await live.refresh()
        assert [len(run["step"]) for run in live.page["runs"]] == [5, 9]

    asyncio.run(story())


def test_what_cannot_be_read_is_said_and_the_page_stays(tmp_path: Path) -> None:
    folder = begin_run(tmp_path / "run")

    def fails(_: Sequence[Path]) -> Page:
        raise PermissionError(13, "Permission denied")

    async def story() -> None:
        live = LivePage([folder], read=reads)
        await live.refresh()
        live._read = fails
        begin_run(folder, 8)
        await live.refresh()
        assert len(live.page["runs"][0]["step"]) == 3
        assert live.notes == ["What is shown is not the newest: [Errno 13] Permission denied"]

    asyncio.run(story())


def test_nothing_is_read_without_a_listener_or_a_change(tmp_path: Path) -> None:
    folder = begin_run(tmp_path / "run")

    async def story() -> None:
        live = LivePage([folder], read=reads, poll_s=0.0)
        reading = asyncio.create_task(live.run())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not live._reading.locked()
        assert live.num_read == 0
        told = live.listen(0, lambda: None)
        while live.num_read == 0:
            await told.get()
        for _ in range(3):
            await live.refresh()
        assert live.num_read == 1
        live.leave(told)
        reading.cancel()

    asyncio.run(story())


def test_a_listener_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    folder, dropped = begin_run(tmp_path / "run"), list[str]()

    async def story() -> None:
        live = LivePage([folder], read=reads)
        await live.refresh()
        slow = live.listen(0, lambda: dropped.append("slow"))
        quick = live.listen(0, lambda: dropped.append("quick"))
        for num in range(4, 4 + 2 * MAX_BEHIND):
            begin_run(folder, num)
            await live.refresh()
            events_in(quick)
        assert dropped == ["slow"]
        assert slow.qsize() <= slow.maxsize
        live.drop_all()
        assert dropped == ["slow", "quick"]

    asyncio.run(story())


def test_a_connection_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    live = LivePage([begin_run(tmp_path / "run")], read=reads)

    async def story(client: Client) -> None:
        stalled = socket.create_connection((client.host, client.port))
        stalled.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await live._heard.wait()
        for _ in range(500):  # MB, far more than the kernel holds of a connection
            live._tell([b"x" * 2**20])
            await asyncio.sleep(0)
        assert not live._listeners
        stalled.close()

    with_client(live, None, story)


def test_ctrl_c_ends_it_at_once_with_an_open_page(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-m", "asyncrl.cli", "watch", str(tmp_path / "later")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{tmp_path / 'later'} is no run yet; the page waits for it\n"
        url = re.match(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert url is not None
        with urllib.request.urlopen(f"{url[0]}events?since=0") as stream:
            assert stream.readline() == b"event: page\n"
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
    on_tokens = [("ink", name) for name in colours if re.match(r"(ver|chance)-\d|masked", name)]
    for pair in [*on_paper, *on_back, *on_tokens, ("accent", "card")]:
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


def test_steps_are_read_on_from_where_the_last_reading_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "time_s": step / 2, "reward/mean": step % 7}) for step in range(3000)]
    kept = StepsFile(tmp_path)

    def check(num: int, size: int) -> None:
        problems, anew = list[str](), list[str]()
        steps, curves = kept.read(problems)
        whole_steps, whole_curves = StepsFile(tmp_path).read(anew)
        assert (curves.x(), curves.curves()) == (whole_curves.x(), whole_curves.curves())
        assert list(steps.column("reward/mean")) == list(whole_steps.column("reward/mean"))
        assert (len(steps), problems, kept._at.num_bytes) == (num, anew, size)

    check(0, 0)
    for num in (1, 2, 1023, 1024, 2500):
        path.write_text("\n".join(lines[:num]) + "\n" + lines[num][:9])
        check(num, path.stat().st_size - 9)
    path.write_text("\n".join([*lines[:1000], "no line", lines[1000].replace("2.0", "2.5")]) + "\n")
    check(1001, path.stat().st_size)
    path.unlink()
    check(0, 0)
