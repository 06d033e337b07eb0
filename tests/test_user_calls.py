"""User coroutines that ignore cancellation are given up, named and counted."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import textwrap
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_cases import virtual

from asyncrl.base.errors import RewardFailure, RolloutFailure, TaskError
from asyncrl.base.user_code import GRACE_S, MAX_ABANDONED, UserCalls
from asyncrl.config import TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks import TaskScorer
from asyncrl.testing.virtual_time import all_blocked

PROMPT = Prompt("p0", ({"role": "user", "content": "hi"},))


async def swallows(*_: object) -> float:
    """A judge that retries forever."""
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(3600.0)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def make_scorer(score: Any, told: list[str]) -> TaskScorer:
    config = TaskConfig(python="my_judge:Task", reward_pool="inline", reward_timeout_s=10.0)
    return TaskScorer(SimpleNamespace(score=score), config, seed=0, warn=told.append)  # type: ignore[arg-type]


def make_calls(told: list[str]) -> UserCalls:
    return UserCalls("f", error=partial(TaskError, "tasks"), warn=told.append)


@virtual
async def test_endless_reward_fails_and_is_named_once() -> None:
    told: list[str] = []
    scorer = make_scorer(swallows, told)
    for number in range(1, 4):
        started_s = now_s()
        with pytest.raises(RewardFailure, match=r"did not return within 10.0 s"):
            await scorer.score(PROMPT, "")
        assert now_s() == started_s + 10.0 + GRACE_S
        assert scorer.num_abandoned == number
    (warning,) = told
    assert "my_judge:Task" in warning
    assert "except Exception:" in warning


@virtual
async def test_call_passes_results_errors_and_cancellation() -> None:
    async def raises(error: BaseException) -> float:
        raise error

    async def cancels_its_task() -> float:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(1.0)
        return 1.0

    calls = make_calls([])
    assert await calls.run(asyncio.sleep(1.0, 7)) == 7
    for error in (KeyError("x"), SystemExit(3), TimeoutError()):
        with pytest.raises(type(error)):
            await calls.run(raises(error))
    with pytest.raises(RolloutFailure, match="f raised CancelledError"):
        await calls.run(cancels_its_task())
    assert not asyncio.current_task().cancelling(), "nobody cancelled its caller"  # type: ignore[union-attr]
    with pytest.raises(RolloutFailure, match="the reward function my_judge:Task raised CancelledError"):
        await make_scorer(lambda *_: cancels_its_task(), []).score(PROMPT, "")


@virtual
async def test_too_many_abandoned_calls_end_the_run() -> None:
    gate = asyncio.Event()

    async def swallows_until_the_gate_opens(*_: object) -> float:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()
        return 1.0

    scorer = make_scorer(swallows_until_the_gate_opens, [])
    scores = (scorer.score(PROMPT, "") for _ in range(MAX_ABANDONED))
    found = await asyncio.gather(*scores, return_exceptions=True)
    assert {type(error) for error in found} == {RewardFailure}
    with pytest.raises(TaskError, match=f"{MAX_ABANDONED} calls of the reward function my_judge:Task"):
        await scorer.score(PROMPT, "")
    gate.set()
    await all_blocked()
    assert await scorer.score(PROMPT, "") == 1.0
    assert scorer.num_abandoned == MAX_ABANDONED, "so far"


SCRIPT = """
    import asyncio, signal, sys, threading
    from asyncrl.base import user_code
    user_code.GRACE_S = 0.1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
    async def never_ends():
        while True:
            try: await asyncio.sleep(3600)
            except: pass
    async def starts_another():
        asyncio.ensure_future(never_ends())
        await never_ends()
    async def well():
        try:
            async with asyncio.timeout(0.1):
                await user_code.UserCalls("f", error=Exception, warn=print).run(starts_another())
        except TimeoutError:
            return 7
    async def interrupted():
        await well()
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(60)
    async def threads():
        hung = [asyncio.ensure_future(asyncio.to_thread(threading.Event().wait)) for _ in range(100)]
        await asyncio.sleep(0)
        return await asyncio.to_thread(lambda: 7)
    sys.exit(asyncio.run(user_code.cancel_remaining(globals()[sys.argv[1]]())))
"""


@pytest.mark.parametrize(("how", "code"), [("well", 7), ("interrupted", -2), ("threads", 7)])
def test_a_process_ends_though_a_call_in_it_never_does(how: str, code: int) -> None:
    """Hung coroutines and hung threads delay neither the end of the loop nor of the process."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert how != "threads" or not done.stderr
    assert not re.search("was never|ignored|destroyed", done.stderr)
