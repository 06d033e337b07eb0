"""The file of recorded rollouts: what is read is what was written, and what is damaged is named by its
line.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_cases import SAMPLED_BY, make_branch, make_prompt, make_record, rollouts_equal, write

from asyncrl.errors import ConfigError
from asyncrl.messages.records import Credit, Trajectory, VersionSpan
from asyncrl.rollouts.recording import RecordedRollout, read_recording


@st.composite
def branches(draw: Any, index: int, branch: int, has_credits: bool) -> Trajectory:
    mask = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=12).filter(any)), dtype=np.bool_)
    places = np.flatnonzero(mask).tolist()
    logprobs = np.zeros(len(mask), dtype=np.float32)
    logprobs[mask] = draw(st.lists(st.floats(-30, 0, width=32), min_size=len(places), max_size=len(places)))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask)))
    spans = tuple(VersionSpan(place, place + 1, place, draw(st.integers(-1, 3))) for place in places)
    return Trajectory(
        index,
        np.array(ids, dtype=np.int32),
        mask,
        logprobs,
        spans,
        reward=draw(st.floats(-1e9, 1e9)),
        is_truncated=draw(st.booleans()),
        num_interruptions=draw(st.integers(0, 9)),
        metrics=draw(st.dictionaries(st.sampled_from(["a", "\u2028"]), st.floats(-5, 5))),
        branch=branch,
        credits=tuple(Credit(place, place + 1, 0.1, place) for place in places) if has_credits else (),
    )


@given(data=st.data(), has_credits=st.booleans(), num_branches=st.integers(1, 3))
def test_what_was_written_is_read_bit_for_bit(data: Any, has_credits: bool, num_branches: int) -> None:
    rollout = tuple(data.draw(branches(0, number, has_credits)) for number in range(num_branches))
    rollout = tuple(replace(branch, reward=rollout[0].reward) for branch in rollout)
    prompt = make_prompt(3, answer={"a": [1, None, "\u2028 x\n"]}, info={"k": 0.25})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        write(path, RecordedRollout(prompt, rollout[0].reward, rollout))
        (record,) = read_recording(path).rollouts
        assert len(path.read_bytes().splitlines()) == 2
    assert (record.prompt, record.reward) == (prompt, rollout[0].reward)
    assert rollouts_equal(record.rollout, rollout)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.jsonl"


def test_people_can_read_what_was_said_and_a_rollout_without_a_reward_has_none(path: Path) -> None:
    write(path, make_record(reward=None))
    header, line = (json.loads(text) for text in path.read_text().splitlines())
    assert {"format": "asyncrl-rollouts", "version": 2, "model_digest": "aaaa"}.items() <= header.items()
    assert (line["branches"][0]["text"], line["reward"]) == ("said", None)
    assert read_recording(path).rollouts[0].reward is None


def test_a_file_that_is_opened_again_goes_on_and_keeps_its_header(path: Path) -> None:
    write(path, make_record(0))
    write(path, make_record(1))
    assert [record.prompt.prompt_id for record in read_recording(path).rollouts] == ["0/0", "0/1"]
    with pytest.raises(ConfigError, match=r"model_digest: aaaa then, cccc now(.|\n)*Way out"):
        write(path, sampled_by=replace(SAMPLED_BY, model_digest="cccc"))
    with pytest.raises(ConfigError, match="holds something already"):
        write(path, must_be_new=True)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_refused_with_its_number(path: Path, cut: int) -> None:
    write(path, make_record(0), make_record(1))
    path.write_bytes(path.read_bytes()[:-cut])
    for attempt in (lambda: read_recording(path), lambda: write(path)):
        with pytest.raises(ConfigError, match=r"line 3 of .*r\.jsonl: it is torn"):
            attempt()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line["branches"][0].update(tokens=line["branches"][0]["tokens"][:-8]), "do not unpack"),
        (lambda line: line.update(sample_index=5), "do not unpack"),
        (lambda line: line.update(reward=float("nan")), r"reward: Input should be a finite number"),
        (lambda line: line.update(rewrad=1.0), "rewrad: Extra inputs are not permitted"),
        (lambda line: line.update(branches=[]), "branches: List should have at least 1 item"),
        (lambda line: line["prompt"].update(messages=[]), "prompt 0/0 is another one than before"),
        (lambda line: line.update(sample_index=1), "sample 1 of prompt 0/0 is in line 2 already"),
    ],
)
def test_a_line_that_cannot_be_is_refused_with_its_number(path: Path, change: Any, said: str) -> None:
    write(path, make_record(0, 1), make_record(0, 0))
    *lines, last = path.read_text().splitlines()
    line = json.loads(last)
    change(line)
    path.write_text("\n".join([*lines, json.dumps(line)]) + "\n")
    with pytest.raises(ConfigError, match=f"line 3 of .*{said}"):
        read_recording(path)


@pytest.mark.parametrize("text", ["", "[]\n", '{"format": "asyncrl-rollouts", "version": 1}\n'])
def test_what_is_no_recording_is_refused(path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read recorded rollouts"):
        read_recording(path)
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1 of"):
        read_recording(path)


def test_a_prompt_that_json_would_change_is_not_recorded(path: Path) -> None:
    said, answers = list[str](), ((1, 2), {1: 2}, {"a"}, float("nan"))
    prompts = (make_prompt(0, answer=answer) for answer in answers)
    write(path, *(RecordedRollout(prompt, 1.0, (make_branch(),)) for prompt in prompts), warn=said.append)
    assert read_recording(path).rollouts == ()
    assert said == ["prompt 0/0 is not recorded: it is no plain JSON, or has tuples"] * 4
