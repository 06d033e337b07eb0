"""Coroutines of the user's that do not end when they are cancelled: given up, named and counted, and never
waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from rollout_cases import single_turn

from asyncrl.config import TaskConfig
from asyncrl.errors import RewardFailure, RolloutFailure, RolloutTimeout, TaskError
from asyncrl.messages.records import GroupId, Prompt
from asyncrl.rollouts.rollout import FailedRollout, RolloutRunner, Slots
from asyncrl.tasks import TaskScorer
from asyncrl.testing.fakes import FakeEngine
from asyncrl.testing.virtual_time import all_blocked, run_virtual, stand_still
from asyncrl.user_code import GRACE_S, MAX_ABANDONED, UserCalls

PROMPT = Prompt("p0", ({"role": "user", "content": "hi"},))


async def swallows(*_: object) -> float:
    """A judge over the network that is asked again, whatever happens."""
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(3600.0)


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Judged:
    """A task whose score is this coroutine function."""

    def __init__(self, score: Any) -> None:
        self.score = score

    def __len__(self) -> int:
        return 1

    def prompt(self, index: int) -> str:
        return "hi"


def make_scorer(
    score: Callable[..., Awaitable[float]], told: list[str], *, timeout_s: float = 10.0
) -> TaskScorer:
    config = TaskConfig(python="my_judge:Task", reward_pool="inline", reward_timeout_s=timeout_s)
    return TaskScorer(Judged(score), config, seed=0, warn=told.append)


def test_a_reward_that_swallows_its_cancellation_is_a_failure_and_its_function_is_named_once() -> None:
    async def story() -> None:
        told: list[str] = []
        scorer = make_scorer(swallows, told)
        for number in range(1, 4):
            started_s = now_s()
            with pytest.raises(
                RewardFailure, match=r"did not return within 10.0 s \(task.reward_timeout_s\)"
            ):
                await scorer.score(PROMPT, "")
            assert now_s() == started_s + 10.0 + GRACE_S
            assert scorer.num_abandoned == number
        (warning,) = told
        assert "my_judge:Task" in warning
        assert "except Exception:" in warning

    run_virtual(story())


def test_a_rollout_whose_reward_swallows_everything_ends_with_its_time_and_when_it_is_cancelled() -> None:
    async def story() -> None:
        scorer = make_scorer(swallows, [], timeout_s=1e6)
        runner = RolloutRunner(single_turn(FakeEngine(), scorer), timeout_s=20.0, retries=2)

        run = partial(runner.run, GroupId(0), PROMPT, slots=Slots(2), order=())
        outcome = await run(0)
        assert isinstance(outcome, FailedRollout)
        assert isinstance(outcome.failure, RolloutTimeout)
        assert now_s() == 20.0 + GRACE_S
        cancelled = asyncio.ensure_future(run(1))
        await asyncio.sleep(5.0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert now_s() == 25.0 + 2 * GRACE_S
        assert scorer.num_abandoned == 2

    run_virtual(story())


def test_a_call_that_cleans_up_within_its_grace_is_waited_for_and_none_of_the_abandoned() -> None:
    async def cleans_up() -> float:
        try:
            await asyncio.sleep(1000.0)
        finally:
            await asyncio.sleep(GRACE_S - 1.0)
        return 1.0

    async def story() -> None:
        calls = UserCalls("f", error=partial(TaskError, "tasks"), warn=[].append)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await calls.run(cleans_up())
        assert now_s() == 10.0 + GRACE_S - 1.0
        assert calls.num_abandoned == 0

    run_virtual(story())


def test_what_a_call_returns_and_raises_passes_and_so_does_its_own_cancellation() -> None:
    async def raises(error: BaseException) -> float:
        raise error

    async def cancels_its_task() -> float:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        await asyncio.sleep(1.0)
        return 1.0

    async def story() -> None:
        calls = UserCalls("f", error=partial(TaskError, "tasks"), warn=[].append)
        assert await calls.run(asyncio.sleep(1.0, 7)) == 7
        for error in (KeyError("x"), SystemExit(3), TimeoutError()):
            with pytest.raises(type(error)):
                await calls.run(raises(error))
        with pytest.raises(RolloutFailure, match="f raised CancelledError; nobody had cancelled it"):
            await calls.run(cancels_its_task())
        current = asyncio.current_task()
        assert current is not None
        assert not current.cancelling(), "nobody has cancelled the one who called it"
        with pytest.raises(RolloutFailure, match="the reward function my_judge:Task raised CancelledError"):
            await make_scorer(lambda *_: cancels_its_task(), []).score(PROMPT, "")

    run_virtual(story())


def test_too_many_abandoned_calls_end_the_run_and_those_that_end_at_last_do_not_count() -> None:
    async def story() -> None:
        gate = asyncio.Event()

        async def swallows_until_the_gate_opens(*_: object) -> float:
            while not gate.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await gate.wait()
            return 1.0

        scorer = make_scorer(swallows_until_the_gate_opens, [])
        found = await asyncio.gather(
            *(scorer.score(PROMPT, "") for _ in range(MAX_ABANDONED)), return_exceptions=True
        )
        assert {type(error) for error in found} == {RewardFailure}
        with pytest.raises(
            TaskError,
            match=rf"{MAX_ABANDONED} calls of the reward function my_judge:Task(.|\n)*Way out: .*except "
            rf"Exception:",
        ):
            await scorer.score(PROMPT, "")
        gate.set()
        await all_blocked()
        assert await scorer.score(PROMPT, "") == 1.0
        assert scorer.num_abandoned == MAX_ABANDONED, "so far"

    run_virtual(story())


def test_a_call_that_ends_well_while_the_loop_stands_still_is_not_abandoned() -> None:
    async def story() -> None:
        told: list[str] = []

        async def cleans_up() -> None:
            try:
                await asyncio.sleep(3600.0)
            finally:
                await asyncio.sleep(1.0)
                await asyncio.sleep(0.001)

        calls = UserCalls("f", error=partial(TaskError, "tasks"), warn=told.append)
        call = asyncio.ensure_future(calls.run(cleans_up()))
        await all_blocked()
        call.cancel()
        await asyncio.sleep(0.5)
        stand_still(100.0)
        await asyncio.wait({call})
        assert (calls.num_abandoned, told) == (0, [])

    run_virtual(story())


EXIT = """
    import asyncio, sys, threading, os, signal
    from asyncrl.config import TaskConfig
    from asyncrl.errors import RewardFailure
    from asyncrl.tasks import TaskScorer
    from asyncrl.messages.records import Prompt
    from asyncrl.user_code import end_what_is_left
    import asyncrl.user_code
    asyncrl.user_code.GRACE_S = 0.1
    class Judged:
        def __len__(self): return 1
        def prompt(self, index): return "hi"
        async def score(self, prompt, completion):
            asyncio.ensure_future(self.never_ends())
            await self.never_ends()
        async def never_ends(self):
            while True:
                try: await asyncio.sleep(3600)
                except: pass
    async def main():
        config = TaskConfig(python="x:y", reward_pool="inline", reward_timeout_s=0.1)
        scorer = TaskScorer(Judged(), config, seed=0)
        try:
            await scorer.score(Prompt("0/0", ()), "")
        except RewardFailure:
            if "interrupted" in sys.argv:
                asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
                await asyncio.sleep(60)
            return 3
    sys.exit(asyncio.run(end_what_is_left(main())))
"""


@pytest.mark.parametrize("how", ["well", "interrupted"])
def test_a_process_ends_though_a_call_in_it_never_does(how: str) -> None:
    """Not only the loop: Python destroys what is left at its end, and the coroutine would run on for that,
    for ever.
    """
    command = [sys.executable, "-c", textwrap.dedent(EXIT), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (3 if how == "well" else -2), done.stderr
    assert "was never" not in done.stderr
    assert "ignored" not in done.stderr
    assert "destroyed" not in done.stderr


HUNG_THREADS = """
    import asyncio, sys, threading
    from asyncrl.user_code import end_what_is_left
    async def main():
        hung = [asyncio.ensure_future(asyncio.to_thread(threading.Event().wait)) for _ in range(100)]
        await asyncio.sleep(0)
        return await asyncio.to_thread(lambda: 7)
    sys.exit(asyncio.run(end_what_is_left(main())))
"""


def test_threads_that_hang_hold_up_neither_others_nor_the_end_of_the_process() -> None:
    """A judge that is asked in asyncio.to_thread, without a timeout: asyncio's own threads are few, and
    joined at the end.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HUNG_THREADS)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (7, "")
