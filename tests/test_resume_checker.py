"""The checker of resumed runs finds nothing in an honest history, and every fault that is planted in it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from journal_cases import make_group, open_journal, rollouts_of
from resume_checker import Promise, read_evidence, violations

from asyncrl.journal.journal import Journal
from asyncrl.messages.records import Batch, Group, GroupId, Prompt, Ticket
from asyncrl.trainer.step_metrics import trained_line
from asyncrl.trainer.trainer_client import pack_groups

PROMISE = Promise(seed=5, num_prompts=7, num_groups=2, group_size=2, max_staleness=1)
NUM_STEPS = 4
Lines = list[dict[str, Any]]


def prompt_of(draw: int) -> Prompt:
    epoch, place = divmod(draw, PROMISE.num_prompts)
    order = np.random.default_rng([PROMISE.seed, epoch]).permutation(PROMISE.num_prompts)
    return Prompt(f"{epoch}/{order[place]}", ())


def admit(journal: Journal, group_id: int, draw: int, version: int) -> None:
    journal.admitted_nowait(Ticket(GroupId(group_id), version), prompt_of(draw))


def make_ready(journal: Journal, group_id: int, draw: int, version: int) -> Group:
    """The whole life of a group whose last rollout has two branches."""
    group = make_group(group_id, size=PROMISE.group_size, branches=2, version=version)
    group = replace(group, prompt=prompt_of(draw))
    admit(journal, group_id, draw, version)
    for rollout in rollouts_of(group):
        journal.rollout_finished_nowait(group.group_id, rollout)
    journal.group_ended_nowait(group.group_id, "ready", "")
    return group


def line_of(batch: Batch) -> dict[str, Any]:
    header, arrays = pack_groups(batch)
    return trained_line(header, arrays, arrays.loss_mask, 0.3)


def write_lines(run_dir: Path, lines: Lines) -> None:
    (run_dir / "trained.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An honest run, killed and resumed at version 2: four batches of an epoch and a bit, then group 8 ready,
    9 failed, 10 handed back, whose prompt runs again as 11.
    """

    async def story() -> list[Batch]:
        journal, batches = open_journal(tmp_path / "journal.sqlite"), []
        for version in range(NUM_STEPS):
            oldest, draws = max(0, version - 1), (2 * version, 2 * version + 1)
            groups = tuple(make_ready(journal, draw, draw, oldest) for draw in draws)
            batches.append(Batch(version, groups, oldest))
            await journal.batch_taken(batches[-1])
        make_ready(journal, 8, 8, 3)
        admit(journal, 9, 9, 3)
        journal.group_ended_nowait(GroupId(9), "failed", "no reward", requeued=1)
        admit(journal, 10, 10, 3)
        journal.group_ended_nowait(GroupId(10), "requeued", "dropped", requeued=1)
        admit(journal, 11, 10, 3)
        await journal.aclose()
        return batches

    first, second, *rest = (line_of(batch) for batch in asyncio.run(story()))
    write_lines(tmp_path, [first, second, rest[0], {"restored": 2}, *rest])
    return tmp_path


def found_in(run_dir: Path, promise: Promise = PROMISE) -> list[str]:
    return violations(read_evidence(run_dir), promise, num_steps=NUM_STEPS)


def test_an_honest_history_has_no_violation(run_dir: Path) -> None:
    evidence = read_evidence(run_dir)
    assert found_in(run_dir) == []
    assert [group.state for group in evidence.groups[8:]] == ["ready", "failed", "requeued", "running"]
    assert sum(len(group.branches) for group in evidence.groups) == 27, "nine groups of three branches"
    assert found_in(run_dir, replace(PROMISE, max_staleness=0)) != []


BLOB = "UPDATE trajectories SET blob = with_head(blob, '{}', '{}') WHERE group_id = {}"
OTHER = "SELECT blob FROM trajectories WHERE group_id = 5 AND sample_index = 0"
PLANTED_SQL = [
    ("DELETE FROM groups WHERE group_id = 9", "group 10 has draw 10, the one before was 8"),
    ("UPDATE groups SET requeued = NULL WHERE group_id = 10", "group 11 was made though group 10 is"),
    ("UPDATE groups SET requeued = NULL WHERE group_id = 9", "is lost: group 9 is failed"),
    ("UPDATE groups SET requeued = 1 WHERE group_id = 8", "came back 1 times with group 8, ready"),
    ("UPDATE groups SET state = 'taken' WHERE group_id = 8", "group 8 is taken, and in batch None"),
    ("DELETE FROM batch_groups WHERE group_id = 3", "batch 1 has 1 groups, 2 and 2"),
    ("DELETE FROM batches WHERE version = 2", "the journal's batches are [0, 1, 3]"),
    ("UPDATE batch_groups SET position = 5 - position WHERE version = 3", "groups in the order [7, 6]"),
    ("UPDATE batches SET min_version = 1 WHERE version = 3", "batch 3 has min_version 1"),
    (BLOB.format("spans", "[[2, 12, 0]]", 6), "g6/r0 has tokens of version 0"),
    (BLOB.format("reward", "9.5", 4), "group 4 was trained on other tokens or rewards"),
    (
        f"UPDATE trajectories SET blob = ({OTHER}) WHERE group_id = 4 AND sample_index = 0",
        "group 4 was trained on",
    ),
]


def with_head(blob: bytes, key: str, value: str) -> bytes:
    """A trajectory with one value of its head replaced."""
    body = zlib.decompress(blob)
    start = 4 + struct.unpack_from("<I", body)[0]
    head = json.dumps(json.loads(body[4:start]) | {key: json.loads(value)}).encode()
    return zlib.compress(struct.pack("<I", len(head)) + head + body[start:])


@pytest.mark.parametrize(("statement", "words"), PLANTED_SQL)
def test_a_fault_in_the_journal_is_found(run_dir: Path, statement: str, words: str) -> None:
    with sqlite3.connect(run_dir / "journal.sqlite") as connection:
        connection.create_function("with_head", 3, with_head)
        assert connection.execute(statement).rowcount > 0
    connection.close()
    assert any(words in violation for violation in found_in(run_dir)), found_in(run_dir)


def entry(number: int, **values: Any) -> Callable[[Lines], Any]:
    """The first trajectory of that line with other values."""
    return lambda lines: lines[number]["trajectories"][0].update(values)


PLANTED_LINES: list[tuple[Callable[[Lines], Any], str]] = [
    (entry(4, tokens_sha="0" * 16), "batch 2 had another trajectories when it was trained again"),
    (lambda lines: lines[4].update(loss=0.5), "batch 2 had another loss when it was trained again"),
    (lambda lines: lines.pop(3), "line 4 is of batch 2, after batch 2"),
    (lambda lines: lines[3].update(restored=4), "line 4 goes on from version 4, which was never reached"),
    (lambda lines: lines.append(dict(lines[-1], version=4)), "g6/r0 was trained on in batch 3 already"),
    (lambda lines: lines.pop(), "the record has batches [0, 1, 2] after 4 steps"),
    (entry(5, spans=[[2, 12, 1]]), "batch 3: g6/r0 has loss on tokens 2..11 of version 1"),
    (entry(5, num_loss_tokens=9), "g6/r0 has 9 loss tokens, its spans 10"),
    (entry(5, group_id=8), "trained were [(8,"),
    (entry(5, prompt_id=prompt_of(0).prompt_id), "was trained on in two groups"),
]


@pytest.mark.parametrize(("plant", "words"), PLANTED_LINES)
def test_a_fault_in_the_record_is_found(run_dir: Path, plant: Callable[[Lines], Any], words: str) -> None:
    lines: Lines = [json.loads(line) for line in (run_dir / "trained.jsonl").read_text().splitlines()]
    plant(lines)
    write_lines(run_dir, lines)
    assert any(words in violation for violation in found_in(run_dir)), found_in(run_dir)
