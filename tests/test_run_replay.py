"""Recorded rollouts in a run: which are taken, when, in which order, and that none is older than the bound
allows.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_groups import make_buffer
from hypothesis import given
from hypothesis import strategies as st
from job_runs import write_config
from recorded_cases import SAMPLED_BY, make_branch, make_prompt, make_record, rollouts_equal
from test_tasks_feed import Numbers

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.messages.records import Group, Prompt, Rollout
from asyncrl.placement.devices import Placement
from asyncrl.rollouts.generators import Replay
from asyncrl.rollouts.producers import Producers
from asyncrl.rollouts.recording import RecordedRollout, RecordFile, Recording
from asyncrl.rollouts.rollout import RolloutAttempt, RolloutRunner
from asyncrl.run.replay import RUN_COPY, choose, open_replay, sampled_by, settle_copy, told
from asyncrl.tasks import Feed
from asyncrl.testing.memory_journal import MemoryJournal
from asyncrl.testing.virtual_time import run_virtual

REPLAY = [Prompt(f"replay/{number}", ({"role": "user", "content": f"r{number}"},)) for number in range(40)]


CPU = Placement(("cpu",), ("cpu",), None, "apart")


def make_config(folder: Path, **sections: Any) -> RunConfig:
    return load_config(write_config(folder, **sections))


def recording(*records: RecordedRollout) -> Recording:
    return Recording(SAMPLED_BY, records)


def write(path: Path, *records: RecordedRollout) -> Path:
    file = RecordFile(path, SAMPLED_BY)
    for record in records:
        file.append(record, ["said"] * len(record.rollout))
    file.close()
    return path


class Sampling:
    """A Generator that samples after a while, at `version`."""

    def __init__(self, seed: int = 0) -> None:
        self.version, self.sampled, self._draw = 0, list[str](), random.Random(seed)

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        version = self.version
        await asyncio.sleep(self._draw.uniform(0.1, 9.0))
        self.sampled.append(attempt.rollout_id)
        return (make_branch(version=version, sample_index=attempt.sample_index, num_tokens=8),)


# ---- what is chosen


def test_what_cannot_be_taken_is_left_out_and_told(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout={"group_size": 2, "max_prompt_tokens": 8, "max_tokens": 8})
    records = [make_record(4, index) for index in range(3)]
    records += [
        make_record(1, 0, reward=None),
        make_record(1, 3),
        make_record(2, 0, version=1),
        make_record(3, 0, num_tokens=17),
    ]
    found = choose(recording(*records), config, Path("f"))
    assert [prompt.prompt_id for prompt in found.prompts] == ["replay/0", "replay/1"], (
        "of 2 and 3 nothing is left"
    )
    assert [prompt.messages for prompt in found.prompts] == [make_prompt(4).messages, make_prompt(1).messages]
    assert [
        [rollout[0].sample_index for rollout in found.rollouts[f"replay/{number}"]] for number in (0, 1)
    ] == [[0, 1], [0]]
    assert rollouts_equal(found.rollouts["replay/0"][1], records[1].rollout)
    assert told(found, config).endswith(
        "; left out: 1 beyond rollout.group_size, 1 without a reward, 1 with tokens of another "
        "policy_version than 0, "
        "1 longer than max_prompt_tokens + max_tokens = 16"
    )


@pytest.mark.parametrize(
    ("buffer", "most"),
    [({"max_staleness": 0}, 8), ({"max_staleness": 2}, 24), ({"max_staleness": 4, "look_ahead": 1}, 16)],
)
def test_how_many_can_be_taken_at_most_follows_from_the_staleness_bound(
    tmp_path: Path, buffer: dict[str, int], most: int
) -> None:
    config = make_config(tmp_path, rollout={"group_size": 2}, trainer={"num_groups": 4}, buffer=buffer)
    found = choose(
        recording(*(make_record(number, index) for number in range(20) for index in range(2))),
        config,
        Path("f"),
    )
    assert f"40 recorded rollouts of 20 prompts, of which at most {most} can be taken: only" in told(
        found, config
    )
    filtering = make_config(
        tmp_path, rollout={"group_size": 2}, buffer={"max_staleness": 0, "filter": "equal_rewards"}
    )
    assert "of which at most 40 can be taken" in told(found, filtering), (
        "each group that is filtered makes room for another"
    )


def test_another_temperature_and_a_file_without_rewards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"temperature: 1\.0 then, 0\.7 now"):
        choose(recording(make_record()), make_config(tmp_path, rollout={"temperature": 0.7}), Path("f"))
    with pytest.raises(
        ConfigError,
        match=r"task\.replay=f has no rollout to train on \(1 rollouts; 1 without a reward\)(.|\n)*Way out",
    ):
        choose(recording(make_record(reward=None)), make_config(tmp_path), Path("f"))


# ---- the file and the run


def test_a_run_that_goes_on_reads_the_copy_that_it_began_with(tmp_path: Path) -> None:
    file, run_dir = write(tmp_path / "r.jsonl", make_record(0)), tmp_path
    config = make_config(tmp_path, task={"replay": str(file)})
    settle_copy(config, run_dir, is_new=True)
    assert open_replay(config, run_dir).num_rollouts == 1  # type: ignore[union-attr]
    write(file, make_record(1))
    settle_copy(config, run_dir, is_new=False)
    assert open_replay(config, run_dir).num_rollouts == 1  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match=r"task\.replay=None, and the run in .* began with recorded rollouts"
    ):
        settle_copy(make_config(tmp_path), run_dir, is_new=False)
    settle_copy(config, run_dir, is_new=True)
    assert not (run_dir / RUN_COPY).exists()
    with pytest.raises(ConfigError, match="began without any"):
        settle_copy(config, run_dir, is_new=False)
    assert open_replay(make_config(tmp_path), run_dir) is None


def test_the_digest_is_of_every_weight_and_of_nothing_else(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    def digest(folder: str, files: dict[str, dict[str, Any]], metadata: dict[str, str] | None = None) -> str:
        path = tmp_path / folder
        path.mkdir()
        (path / "tokenizer.json").write_text("{}")
        for name, tensors in files.items():
            save_file(tensors, path / name, metadata)
        return sampled_by(make_config(tmp_path), path, CPU).model_digest

    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, dtype=np.float16)}
    whole = digest("whole", {"model.safetensors": weights})
    assert (
        digest(
            "shards",
            {"m-1.safetensors": {"b": weights["b"]}, "m-2.safetensors": {"a": weights["a"]}},
            {"x": "y"},
        )
        == whole
    )
    assert digest("shape", {"model.safetensors": weights | {"a": weights["a"].reshape(3, 2)}}) != whole
    assert (
        digest("value", {"model.safetensors": weights | {"b": np.array([0, 0, 1], dtype=np.float16)}})
        != whole
    )
    assert digest("name", {"model.safetensors": {"a": weights["a"], "c": weights["b"]}}) != whole
    with pytest.raises(ConfigError, match="has no safetensors file"):
        digest("none", {})


# ---- the order of prompts


def test_recorded_prompts_come_first_in_their_order_and_the_task_follows_as_if_they_were_not_there() -> None:
    plain, feed = (
        Feed(Numbers(5), seed=3, shuffle=True),
        Feed(Numbers(5), seed=3, shuffle=True, first=REPLAY[:3]),
    )
    assert [feed.next_nowait() for _ in range(15)] == REPLAY[:3] + [plain.next_nowait() for _ in range(12)]


@given(
    size=st.integers(1, 5),
    num_first=st.integers(0, 5),
    moves=st.lists(st.integers(-3, 3), max_size=30),
    data=st.data(),
)
def test_no_kill_loses_or_repeats_a_recorded_prompt(
    size: int, num_first: int, moves: list[int], data: Any
) -> None:
    def make() -> Feed:
        return Feed(Numbers(size), seed=1, shuffle=True, first=REPLAY[:num_first])

    feed, out = make(), list[Prompt]()
    for move in moves:
        if move >= 0 or not out:
            out.append(feed.next_nowait())
        else:
            feed.hand_back_nowait(out.pop(data.draw(st.integers(0, len(out) - 1))))
    saved, journaled = make(), make()
    saved.load_state(json.loads(json.dumps(feed.state())))
    journaled.restore_nowait(feed.num_drawn, feed.prompts_back())
    coming = [feed.next_nowait() for _ in range(3 * size + num_first)]
    assert [saved.next_nowait() for _ in coming] == coming
    assert [journaled.next_nowait() for _ in coming] == coming
    assert max(Counter(prompt.prompt_id for prompt in [*out, *coming]).values()) == 1


# ---- in the house


def recorded_rollouts(num_prompts: int, of_each: int) -> dict[str, tuple[Rollout, ...]]:
    return {
        prompt.prompt_id: tuple((make_branch(sample_index=index),) for index in range(of_each))
        for prompt in REPLAY[:num_prompts]
    }


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("of_each", [2, 3])
def test_recorded_rollouts_are_taken_while_their_version_is_served_and_the_bound_holds(
    max_staleness: int, of_each: int
) -> None:
    num_batches, num_groups, num_prompts = 6, 2, 20
    recorded, taken, groups = recorded_rollouts(num_prompts, of_each), list[str](), list[Group]()

    async def story() -> None:
        sampling = Sampling(max_staleness)
        buffer = make_buffer(
            num_groups=num_groups,
            num_batches=num_batches,
            max_staleness=max_staleness,
            look_ahead=max_staleness,
        )
        async with asyncio.TaskGroup() as tasks:
            replay = Replay(
                sampling, recorded, start_version=lambda group_id: producers.start_version(group_id)
            )
            producers = Producers(
                buffer,
                Feed(Numbers(9), seed=0, shuffle=True, first=REPLAY[:num_prompts]),
                RolloutRunner(replay, timeout_s=99.0, retries=0),
                spawn=tasks.create_task,
                group_size=3,
                capacity=6,
                max_failed_groups=1,
                max_hand_backs=3,
                journal=MemoryJournal(),
            )
            running = tasks.create_task(producers.run(), name="producers")
            for version in range(num_batches):
                batch = await buffer.wait_batch()
                groups.extend(batch.groups)
                for group in batch.groups:
                    assert group.oldest_version >= version - max_staleness
                await asyncio.sleep(
                    60.0
                )  # the step: meanwhile everything starts that may start at the old version
                sampling.version = version + 1
                buffer.set_served_nowait(version + 1)
            running.cancel()
            await producers.aclose()
        assert replay.num_taken == of_each * num_groups * (max_staleness + 1)
        taken.extend(sampling.sampled)

    run_virtual(story())
    assert [group.prompt.prompt_id for group in sorted(groups, key=lambda group: group.group_id)] == [
        prompt.prompt_id for prompt in REPLAY[: num_batches * num_groups]
    ]
    num_replayed = num_groups * (max_staleness + 1)
    for group in groups:
        is_taken = group.group_id < num_replayed
        for branch in group.trajectories:
            is_recorded = (
                rollouts_equal((branch,), recorded[group.prompt.prompt_id][branch.sample_index])
                if branch.sample_index < of_each
                else False
            )
            assert is_recorded == (is_taken and branch.sample_index < of_each)
            assert (f"g{group.group_id}/r{branch.sample_index}" in taken) == (not is_recorded)
