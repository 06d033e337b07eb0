"""`asyncrl inspect` tells what became of every group, from the journal and the trainer's own record."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import journal_cases
import numpy as np
import pytest
from asyncrl.observe.inspect import pieces, render_inspect
from hypothesis import given
from hypothesis import strategies as st
from job_runs import environment, read_lines, run, write_config
from journal_cases import admit, make_batch, make_trajectory, tell_a_run

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Batch, GroupId, VersionSpan
from asyncrl.observe.metrics import gauge_of
from asyncrl.trainer.step_report import append_line, trained_line
from asyncrl.trainer.trainer_client import pack_groups


def record(run_dir: Path, batch: Batch) -> None:
    header, arrays = pack_groups(batch)
    append_line(run_dir / "trained.jsonl", trained_line(header, arrays, arrays.loss_mask, 0.5))


async def live(run_dir: Path) -> Journal:
    """A run of which step 1 is in the trainer's record; its group 7 was filtered, 8 has a rollout of several
    branches.
    """
    config = {"model": {"path": "nowhere/at-all"}, "task": {"python": "a:B"}, "rollout": {"group_size": 2}}
    (run_dir / "config.yaml").write_text(run_config_yaml(RunConfig.model_validate(config)))
    append_line(run_dir / "metrics.jsonl", {"step": 1, "tokens/sampled": 40, "tokens/trained": 33})
    record(run_dir, make_batch(0, 0, 1))
    journal = journal_cases.open_journal(run_dir / "journal.sqlite")
    await tell_a_run(journal)
    admit(journal, 7)
    for index in range(2):
        journal.rollout_finished_nowait(GroupId(7), (make_trajectory(7, index),))
    journal.group_ended_nowait(GroupId(7), "filtered", "buffer.filter")
    admit(journal, 8)
    journal.rollout_finished_nowait(GroupId(8), journal_cases.make_rollout(8, 0, has_credits=True))
    journal.event_nowait("stuck", {"seconds": 12.5, "waits": [{"who": "train loop"}]})
    await journal.flush()
    return journal


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a run that goes on."""
    folder = tmp_path_factory.mktemp("live")
    with asyncio.Runner() as runner:
        journal = runner.run(live(folder))
        yield folder
        runner.run(journal.aclose())


def as_json(run_dir: Path, **options: Any) -> Any:
    return json.loads(render_inspect(run_dir, as_json=True, **options))


def as_text(run_dir: Path, **options: Any) -> str:
    return " ".join(render_inspect(run_dir, **options).split())


def test_a_run_says_where_its_groups_and_tokens_went_and_what_happened_to_it(run_dir: Path) -> None:
    plain = as_json(run_dir)
    journal = plain["journal"]
    assert journal["groups"] == {"failed": 1, "filtered": 1, "handed_back": 1, "running": 2, "taken": 4}
    wasted = {"retried": 15, "failed": 0, "filtered": 20, "handed_back": 10, "masked": 7}
    assert (journal["wasted_tokens"], journal["sampled_tokens"]) == (wasted, 80 + 20 + 20 + 10 + 15)
    assert (journal["num_trained"], journal["num_batches"], journal["failed_rollouts"]) == (1, 2, 1)
    assert [event["what"] for event in journal["events"]] == ["restored", "engine_restarted", "stuck"]
    assert (plain["bound_kept"], plain["problems"], plain["num_steps"]) == (True, [], 1)


def test_the_story_of_a_trained_group_joins_journal_and_record(run_dir: Path) -> None:
    plain = as_json(run_dir, group=1)
    story, expected = plain["story"], make_trajectory(1, 0)
    assert (story["state"], story["start_version"], story["batch"]) == ("taken", 0, 0)
    assert story["admitted_at"] <= story["ended_at"] <= story["trained_at"]
    assert story["messages"] == [{"role": "user", "content": "Question 1"}]
    first, piece = story["rollouts"][0], {"start": 2, "end": 12, "version": 0}
    assert (first["state"], first["num_sampled"], first["reward"]) == ("finished", 10, expected.reward)
    assert first["pieces"] == [piece | {"token_ids": expected.token_ids[2:].tolist()}]
    (step,) = plain["steps"]
    assert [entry["num_loss_tokens"] for entry in step["trajectories"]] == [10, 10]


def test_a_rollout_with_branches_is_told_branch_by_branch_with_what_each_part_earned(run_dir: Path) -> None:
    story = as_json(run_dir, group=8)["story"]
    assert (story["num_rollouts"], story["num_sampled"], story["reward_mean"]) == (1, 20, 0.25)
    first, second = story["rollouts"]
    assert (first["reward"], first["num_sampled"], second["state"]) == (0.25, 20, "running")
    assert "pieces" not in first
    sampled = [branch["pieces"][0]["token_ids"] for branch in first["branches"]]
    assert sampled == [branch.token_ids[2:].tolist() for branch in journal_cases.make_rollout(8, 0)]
    assert first["branches"][1]["credits"][0] == {"start": 2, "end": 7, "reward": 1.2, "unit": 2}


RUN = """groups failed 1, filtered 1, handed_back 1, running 2, taken 4
version 1, path checkpoints/step_1
what engine_restarted, detail name engine-0, after_s 1.500
bound kept"""
FAILED = """state failed
reason too few usable rollouts
sample 0: failed at each of 2 attempts, the last: timed out"""
RUNNING = """sample 0: runs, nothing is written down yet
sample 1: runs, attempt 1, turn 2, 4 tokens so far [v0, 0..3] 0 1 2 3
text_from no tokenizer.json in"""
BRANCHES = """sample 0: reward 0.250, 20 tokens, 0 interruptions branch 0: 10 tokens [v0, 2..11]
[7..11] reward 1.700, unit 3"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, RUN),
        ({"group": 4}, FAILED),
        ({"group": 5}, "state handed_back\nreason dropped\nsame_prompt 6"),
        ({"group": 6}, RUNNING),
        ({"group": 8}, BRANCHES),
    ],
)
def test_people_are_told_the_same(run_dir: Path, options: dict[str, Any], words: str) -> None:
    text = as_text(run_dir, **options)
    for said in words.splitlines():
        assert said in text


def test_a_step_shows_its_batch_whether_trained_or_not(run_dir: Path) -> None:
    batch, taken = as_json(run_dir, step=1)["batch"], as_json(run_dir, step=2)
    assert batch["tokens_by_version"] == {"0": 40}
    assert [group["group_id"] for group in batch["groups"]] == [0, 1]
    assert (taken["batch"]["trained_at"], taken["steps"]) == (None, [])


def test_tokens_that_were_deleted_leave_the_groups_numbers_and_a_damaged_journal_leaves_the_record(
    tmp_path: Path,
) -> None:
    async def compacted() -> None:
        journal = await live(tmp_path)
        await journal.compact(1)
        await journal.aclose()

    asyncio.run(compacted())
    story = as_json(tmp_path, group=0)["story"]
    assert (story["has_tokens"], story["rollouts"], story["num_sampled"]) == (False, [], 20)
    assert "samples.jsonl has none of it" in as_text(tmp_path, group=0)
    sample = {"step": 1, "kind": "best", "group_id": 0, "sample_index": 1, "prompt_id": "0/0", "messages": []}
    sample |= {"reward": 0.5, "metrics": {}, "num_sampled": 0, "versions": [], "staleness": 0, "parts": []}
    sample |= {"logprob_gap": None, "is_truncated": False, "num_interruptions": 0, "error": None}
    append_line(tmp_path / "samples.jsonl", sample)
    assert "--samples --group 0` shows 1 rollout of it" in as_text(tmp_path, group=0)
    assert "best sample of step 1: reward 0.500" in as_text(tmp_path, group=0, samples=True)
    assert [found["sample_index"] for found in as_json(tmp_path, kinds=["best"])["samples"]] == [1]
    with pytest.raises(ConfigError, match=r"has no worst sample of step 1(.|\n)*--samples` shows the newest"):
        render_inspect(tmp_path, step=1, kinds=["worst"])
    (tmp_path / "journal.sqlite").write_bytes(b"no journal at all" * 100)
    (tmp_path / "journal.sqlite-wal").unlink(missing_ok=True)
    plain = as_json(tmp_path)
    assert ("journal" in plain, plain["bound_kept"]) == (False, True)
    assert "journal.sqlite" in plain["problems"][0]


def test_a_step_that_was_trained_again_counts_once_and_on_other_data_it_is_found(
    run_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    batch = make_batch(1, 2, 3)
    group, *groups = batch.groups
    first, *others = group.trajectories
    changed = [{"token_ids": first.token_ids + np.int32(1)}, {"reward": -1.0}, {"reward": -2.0}]
    changed = [replace(group, trajectories=(replace(first, **change), *others)) for change in changed]
    answers = []
    for again in (batch, batch, *(replace(batch, groups=(one, *groups)) for one in changed)):
        record(tmp_path, again)
        answers.append(as_json(tmp_path))
        append_line(tmp_path / "trained.jsonl", {"restored": 1})
    _, same, *differ = answers
    assert [step["step"] for step in same["steps"]] == [1, 2]
    assert (same["violations"], same["restored_from"]) == ([], [1])
    told = "step 2 was trained again on other data than before it was restored"
    assert [each["violations"] for each in differ] == [[told], [told] * 2, [told] * 3]


def test_in_a_rollout_of_several_turns_a_piece_is_what_was_sampled_and_not_what_stood_before_it() -> None:
    text = "ask one tool two!"
    spans = (VersionSpan(4, 6, 1), VersionSpan(6, 8, 2), VersionSpan(13, 17, 2))
    found = pieces([*map(ord, text)], spans, lambda ids: "".join(map(chr, ids)))
    assert [piece["text"] for piece in found] == ["on", "e ", "two!"]


@given(st.text(min_size=1, max_size=12), st.data())
def test_the_pieces_of_a_completion_add_up_to_its_text_wherever_versions_change(
    text: str, data: st.DataObject
) -> None:
    ids = [7, 7, *text.encode()]
    cuts = sorted(data.draw(st.sets(st.integers(3, len(ids) - 1), max_size=4))) if len(ids) > 3 else []
    edges = pairwise([2, *cuts, len(ids)])
    spans = [VersionSpan(start, end, version) for version, (start, end) in enumerate(edges)]
    found = pieces(
        ids, spans, lambda ids: bytes(ids).decode(errors="replace")
    )  # a character may take several
    assert "".join(piece["text"] for piece in found) == text
    assert [VersionSpan(piece["start"], piece["end"], piece["version"]) for piece in found] == spans


@pytest.mark.slow
def test_a_real_run_can_be_asked_for_the_conversation_of_a_group_without_torch(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    answer = run(write_config(tmp_path, buffer={"max_staleness": 2}), run_dir, "trainer.num_steps=4")
    assert answer.returncode == 0, answer.stderr
    script = (
        "import sys; from asyncrl.observe.inspect import render_inspect;"
        "print(render_inspect(sys.argv[1], as_json=True, group=int(sys.argv[2]))); assert 'torch' not in "
        "sys.modules"
    )
    entry = read_lines(run_dir / "trained.jsonl")[-1]["trajectories"][0]
    command = [sys.executable, "-c", script, str(run_dir), str(entry["group_id"])]
    asked = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert asked.returncode == 0, asked.stderr
    plain = json.loads(asked.stdout)
    story, problems = plain["story"], plain["problems"]
    assert (problems, story["batch"], story["prompt_id"]) == ([], 3, entry["prompt_id"])
    (rollout,) = [each for each in story["rollouts"] if each["sample_index"] == entry["sample_index"]]
    assert rollout["reward"] == entry["reward"]
    assert [[piece["start"], piece["end"], piece["version"]] for piece in rollout["pieces"]] == entry["spans"]
    assert all("text" in piece for piece in rollout["pieces"])
    written = {name for line in read_lines(run_dir / "metrics.jsonl") for name in line}
    assert {"perf/step_s", "policy/loss", "engine/decode_s"} <= written
    assert [name for name in written if gauge_of(name) is None] == []
    whole = json.loads(render_inspect(run_dir, as_json=True))["journal"]
    assert (whole["groups"]["taken"], whole["num_trained"]) == (16, 4)
