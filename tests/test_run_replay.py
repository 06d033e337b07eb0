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

import pytest
from buffer_groups import make_buffer
from hypothesis import given
from hypothesis import strategies as st
from job_runs import write_config
from recorded_cases import SAMPLED_BY, make_branch, make_prompt, make_record, rollouts_equal, write
from rollout_cases import make_producers
from test_tasks_feed import Numbers

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError, TaskError
from asyncrl.job.check import choose, open_replay
from asyncrl.job.engine_kinds import sampled_by
from asyncrl.messages.records import Group, Prompt, Rollout
from asyncrl.placement.devices import Placement
from asyncrl.rollouts.generators import Replay
from asyncrl.rollouts.recording import Recording
from asyncrl.rollouts.rollout import RolloutAttempt
from asyncrl.tasks import Feed
from asyncrl.testing.virtual_time import run_virtual

REPLAY = [Prompt(f"replay/{number}", ({"role": "user", "content": f"r{number}"},)) for number in range(20)]


def make_config(folder: Path, **sections: Any) -> RunConfig:
    return load_config(write_config(folder, **sections))


def test_what_cannot_be_taken_is_left_out_and_told(tmp_path: Path) -> None:
    config = make_config(tmp_path, rollout={"group_size": 2, "max_prompt_tokens": 8, "max_tokens": 8})
    records = [make_record(4, index) for index in range(3)]
    records += [make_record(1, 0, reward=None), make_record(1, 3)]
    records += [make_record(2, 0, version=1), make_record(3, 0, num_tokens=17)]
    found = choose(Recording(SAMPLED_BY, tuple(records)), config, Path("f"))
    prompts = [("replay/0", make_prompt(4).messages), ("replay/1", make_prompt(1).messages)]
    assert [(prompt.prompt_id, prompt.messages) for prompt in found.prompts] == prompts, "none of 2 and 3"
    numbers = [[one[0].sample_index for one in found.rollouts[f"replay/{number}"]] for number in (0, 1)]
    assert numbers == [[0, 1], [0]]
    assert rollouts_equal(found.rollouts["replay/0"][1], records[1].rollout)
    said = "1 beyond rollout.group_size, 1 without a reward, 1 with tokens of another policy_version than 0"
    assert found.text.endswith(f"; left out: {said}, 1 longer than max_prompt_tokens + max_tokens = 16")


def test_another_temperature_and_a_file_without_rewards_are_refused(tmp_path: Path) -> None:
    colder = make_config(tmp_path, rollout={"temperature": 0.7})
    with pytest.raises(ConfigError, match=r"temperature: 1\.0 then, 0\.7 now"):
        choose(Recording(SAMPLED_BY, (make_record(),)), colder, Path("f"))
    with pytest.raises(ConfigError, match="no rollout to train on: 0 .* left out: 1 without a reward"):
        choose(Recording(SAMPLED_BY, (make_record(reward=None),)), make_config(tmp_path), Path("f"))


def test_a_run_that_goes_on_reads_the_copy_that_it_began_with(tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", make_record(0))
    config, without = make_config(tmp_path, task={"replay": str(file)}), make_config(tmp_path)
    for _ in ("new", "resumed"):
        assert len(open_replay(config, tmp_path).prompts) == 1  # type: ignore[union-attr]
        write(file, make_record(1))
    assert open_replay(without, tmp_path) is None


def test_the_digests_are_of_weights_and_tokenizer_and_of_nothing_else(tmp_path: Path) -> None:
    def digests(name: str, content: str, **model: Any) -> tuple[str, str]:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(content)
        config = make_config(tmp_path, **({"model": model} if model else {}))
        sampled = sampled_by(config, folder, Placement(("cpu",), (("cpu",),), None, "apart"))
        return sampled.model_digest, sampled.tokenizer

    digests("model.safetensors", "weights")
    first = digests("tokenizer.json", "{}")
    assert digests("README.md", "x") == first
    assert digests("tokenizer.json", "{1}") == (first[0], digests("tokenizer.json", "{1}")[1]) != first
    digests("tokenizer.json", "{}")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert digests("README.md", "x", chat_template=str(tmp_path / "own.jinja"))[1] != first[1]
    assert digests("model.safetensors", "others")[0] != first[0]


@given(st.integers(1, 5), st.integers(0, 5), st.lists(st.integers(-3, 3), max_size=30), st.data())
def test_recorded_prompts_come_first_and_no_kill_loses_or_repeats_one(
    size: int, num_first: int, moves: list[int], data: Any
) -> None:
    def make(num_first: int = num_first) -> Feed:
        return Feed(Numbers(size), seed=1, shuffle=True, first=REPLAY[:num_first])

    plain, fresh = make(0), make()
    assert [fresh.next_nowait() for _ in range(num_first)] == REPLAY[:num_first]
    assert [fresh.next_nowait() for _ in range(9)] == [plain.next_nowait() for _ in range(9)]
    feed, out = make(), list[Prompt]()
    for move in moves:
        if move >= 0 or not out:
            out.append(feed.next_nowait())
        else:
            feed.hand_back_nowait(out.pop(data.draw(st.integers(0, len(out) - 1))))
    saved, journaled = make(), make()
    saved.load_state(json.loads(json.dumps(feed.state())))
    journaled.restore_nowait(feed.num_drawn, feed.prompts_back())
    with pytest.raises(TaskError, match="num_first"):  # task.replay was added, or is another one
        make(num_first + 1).load_state(feed.state())
    coming = [feed.next_nowait() for _ in range(3 * size + num_first)]
    assert [saved.next_nowait() for _ in coming] == coming
    assert [journaled.next_nowait() for _ in coming] == coming
    assert max(Counter(prompt.prompt_id for prompt in [*out, *coming]).values()) == 1


class Sampling:
    """A Generator that samples after a while, at `version`."""

    def __init__(self) -> None:
        self.version, self.sampled, self._draw = 0, list[str](), random.Random(0)

    async def run_attempt(self, attempt: RolloutAttempt) -> Rollout:
        version = self.version
        await asyncio.sleep(self._draw.uniform(0.1, 9.0))
        self.sampled.append(attempt.rollout_id)
        return (make_branch(version=version, sample_index=attempt.sample_index, num_tokens=8),)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("of_each", [2, 3])
def test_recorded_rollouts_are_taken_while_their_version_is_served_and_the_bound_holds(
    max_staleness: int, of_each: int
) -> None:
    num_batches, num_groups, sampling, groups = 6, 2, Sampling(), list[Group]()
    num_replayed = num_groups * (max_staleness + 1)
    branches = tuple((make_branch(sample_index=index),) for index in range(of_each))
    recorded = {prompt.prompt_id: branches for prompt in REPLAY}

    async def story() -> None:
        buffer = make_buffer(num_groups=num_groups, num_batches=num_batches, max_staleness=max_staleness)
        async with asyncio.TaskGroup() as tasks:
            replay = Replay(sampling, recorded, start_version=lambda group: producers.start_version(group))
            source = Feed(Numbers(9), seed=0, shuffle=True, first=REPLAY)
            values = {"source": source, "group_size": 3, "capacity": 6, "max_failed_groups": 1}
            producers = make_producers(buffer, tasks.create_task, replay, **values)
            running = tasks.create_task(producers.run(), name="producers")
            for version in range(num_batches):
                batch = await buffer.wait_batch()
                groups.extend(batch.groups)
                assert all(group.oldest_version >= version - max_staleness for group in batch.groups)
                await asyncio.sleep(60.0)  # meanwhile all starts that may start at the old version
                sampling.version = version + 1
                buffer.set_served_nowait(version + 1)
            running.cancel()
            await producers.aclose()
        assert replay.num_taken == of_each * num_replayed

    run_virtual(story())
    in_order = sorted(groups, key=lambda group: group.group_id)
    assert [group.prompt for group in in_order] == REPLAY[: num_batches * num_groups]
    for group in groups:
        for branch in group.trajectories:
            index = branch.sample_index
            is_recorded = index < of_each and rollouts_equal((branch,), branches[index])
            assert is_recorded == (group.group_id < num_replayed and index < of_each)
            assert (f"g{group.group_id}/r{index}" in sampling.sampled) == (not is_recorded)
