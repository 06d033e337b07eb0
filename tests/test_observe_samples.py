"""Samples: choice of rollouts, their text, and the file."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from buffer_groups import make_group
from hypothesis import given
from hypothesis import strategies as st
from page_cases import make_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from token_cases import trajectory_of, with_ids

from asyncrl.base.errors import ConfigError, RolloutFailure
from asyncrl.messages.records import (
    Batch,
    GroupId,
    PolicyCall,
    Prompt,
    Rollout,
    Trajectory,
    VersionSpan,
)
from asyncrl.observe import samples as samples_module
from asyncrl.observe.console import Console
from asyncrl.observe.run_dir import append_lines
from asyncrl.observe.samples import (
    MAX_CHARS,
    MAX_PARTS,
    SampleWriter,
    ShownRollout,
    choose,
    harmless,
    read_samples,
    sample_text,
    shown,
)
from asyncrl.observe.show import render_inspect
from asyncrl.observe.trackers import TensorBoard, TrackedRun
from asyncrl.rollouts.rollout import FailedRollout

HOSTILE = "\x1b[31m\x1b]0;owned\x07[red]red[/red] <script>alert(1)</script>"
HOSTILE += "\r\u202e :smile:\n\n# no title\n```\n"


def letters(token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Decode: token 97 is `a`."""
    return "".join(map(chr, token_ids))


def make_batch(rewards: Sequence[Sequence[float]], version: int = 3) -> Batch:
    groups = [
        make_group(n, *([[version]] * len(of)), rewards=of)
        for n, of in enumerate(rewards)
    ]
    return Batch(version, tuple(groups), 0)


@given(
    rewards=st.lists(
        st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    num=st.integers(0, 8),
    seed=st.integers(0, 3),
)
def test_best_and_worst_are_chosen_then_others_by_chance(
    rewards: list[list[float]], num: int, seed: int
) -> None:
    batch, flat = make_batch(rewards), sum(rewards, [])
    found = choose(batch, num, seed)
    names = [(group.group_id, rollout[0].sample_index) for _, group, rollout in found]
    assert len(set(names)) == len(names) == min(num, len(flat))
    assert [kind for kind, *_ in found] == ["best", "worst", *["random"] * num][
        : len(found)
    ]
    assert [rollout[0].reward for *_, rollout in found[:2]] == [max(flat), min(flat)][
        : len(found)
    ]
    assert [group.group_id for _, group, _ in choose(batch, num, seed)] == [
        name for name, _ in names
    ]


def turns(
    *lengths: int, versions: Callable[[int], int] = lambda place: 8, **more: Any
) -> Trajectory:
    """Stretches of these lengths, every other one sampled, the first is the prompt; one
    letter a token.
    """
    mask = np.concatenate([np.full(num, n % 2 == 1) for n, num in enumerate(lengths)])
    places = np.flatnonzero(mask).tolist()
    spans = tuple(VersionSpan(place, place + 1, versions(place)) for place in places)
    ids = (97 + np.arange(len(mask)) % 26).astype(np.int32)
    return trajectory_of(0, ids, mask, np.where(mask, -0.5, 0.0), spans, 0.25, **more)


def show(
    rollout: Rollout, kind: Any = "random", step: int = 10, **more: Any
) -> ShownRollout:
    prompt = more.pop("prompt", Prompt("0/4", ()))
    name: Any = {"kind": kind, "group_id": 5, "sample_index": 0}
    return name | shown(prompt, rollout, letters, step=step, min_version=7, **more)


def test_every_turn_of_every_branch_is_shown() -> None:
    main = turns(
        3,
        2,
        2,
        2,
        versions=lambda place: 6 if place == 3 else 8,
        metrics={"solved": 1.0},
    )
    call = PolicyCall(7, 9, "chatcmpl-1", 0.0, 1.0, "stop", (), "searcher/reader")
    fork = replace(
        main, branch=1, is_truncated=True, num_interruptions=2, calls=(call,)
    )
    sample = show((main, fork), gap=0.01)
    agents = [part.get("agent") for part in sample["parts"]]
    assert agents == [None] * 7 + ["searcher/reader"]
    texts = [
        (part["branch"], part["is_sampled"], part["text"])
        for part in sample["parts"][:4]
    ]
    assert texts == [
        (0, False, "abc"),
        (0, True, "de"),
        (0, False, "fg"),
        (0, True, "hi"),
    ]
    assert [part["branch"] for part in sample["parts"]] == [0] * 4 + [1] * 4
    assert (sample["versions"], sample["staleness"], sample["reward"]) == (
        [6, 8],
        1,
        0.25,
    )
    assert (
        sample["is_truncated"],
        sample["num_interruptions"],
        sample["num_sampled"],
    ) == (True, 2, 8)
    lines = [" ".join(line.split()) for line in sample_text(sample).splitlines()]
    assert (
        "versions 6..8, staleness 1, 8 tokens, logprob gap 0.01, truncated, 2 interruptions"
        in lines[0]
    )
    once = ["model | de", "context | fg", "model | hi"]
    assert lines[1:] == ["prompt | abc", *once, "branch 1", "context | abc", *once]


PIECES = (b"the", b"7\n", b" " * 99, b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b" ")


def joined(token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    return b"".join(PIECES[token] for token in token_ids).decode(errors="replace")


@given(
    words=st.lists(
        st.sampled_from([(0,), (1,), (2,), (3, 4, 7), (5, 6, 0)]), min_size=1
    )
)
def test_tokens_divide_their_text(words: list[tuple[int, ...]]) -> None:
    ids = sum(words, ())
    rollout = with_ids(turns(0, len(ids)), ids)
    (part,) = shown(Prompt("0/4", ()), (rollout,), joined, step=10)["parts"]
    ends = [*itertools.accumulate(ord(length) - 48 for length in part["tokens"][::3])]
    wholes = [joined(ids[: number + 1]) for number in range(len(ids))]
    assert all(
        "\ufffd" in whole or len(whole) == end
        for whole, end in zip(wholes, ends, strict=True)
    )
    assert part["tokens"][1::3] == "6" * len(ids), "exp(-0.5) is 60 %"


def test_long_texts_and_many_parts_are_cut() -> None:
    prompt = Prompt(
        "0/4", ({"role": "user", "content": "word " * 4000},), answer={"a": "\ud800"}
    )
    sample = show((turns(*[MAX_CHARS + 99] * (MAX_PARTS + 2)),), prompt=prompt)
    assert len(sample["parts"]) == MAX_PARTS
    texts = [
        sample["messages"][0]["content"],
        *(part["text"] for part in sample["parts"]),
    ]
    assert all(MAX_CHARS < len(text) < MAX_CHARS + 10 for text in texts)
    json.dumps(sample).encode()


def a_sample(
    step: int, kind: Any = "random", group_id: int = 0, text: str = "hi"
) -> ShownRollout:
    rollout = with_ids(turns(1, len(text)), [120, *map(ord, text)])
    sample = show(
        (rollout,),
        kind,
        step,
        prompt=Prompt("0/4", ({"role": "user", "content": text},)),
    )
    return {**sample, "group_id": group_id}


def steps_in(folder: Path) -> list[tuple[int, str]]:
    return [(sample["step"], sample["kind"]) for sample in read_samples(folder, [])]


def writer_of(folder: Path, **more: Any) -> SampleWriter:
    return SampleWriter(folder, **{"seed": 1, "per_step": 2, **more})


def fail(writer: SampleWriter, group_id: int, *rollout: Trajectory) -> None:
    prompt = Prompt("0/7", ({"role": "user", "content": "why"},), answer="so")
    failed = FailedRollout(1, 2, RolloutFailure("no reward"))
    writer.add_failed(GroupId(group_id), prompt, failed, rollout, letters)


def test_a_resume_drops_samples_of_repeated_steps(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    fail(writer, 1, turns(2, 3))
    fail(writer, 2)
    fail(writer, 3)
    assert steps_in(tmp_path) == [(1, "failed")] * 2
    writer.step(
        make_batch([[0.0, 1.0, 2.0, 3.0]], version=0),
        {(0, 3): 0.25},
        {(0, 3): 1.5},
        letters,
    )
    fail(writer, 4)
    first, second, best, *_ = read_samples(tmp_path, [])
    assert "failed 2 times, last (agent_crash): no reward" in (first["error"] or "")
    assert (
        first["reward"],
        first["staleness"],
        first["num_sampled"],
        second["parts"],
    ) == (None, None, 3, [])
    assert (best["reward"], best["logprob_gap"], best["sample_index"]) == (3.0, 0.25, 3)
    group = [(3, 3.0, 1.5), (2, 2.0, None), (1, 1.0, None), (0, 0.0, None)]
    assert [
        (index, reward, advantage) for index, reward, advantage, *_ in best["group"]
    ] == group
    assert "failed rollout of step 1: no reward" in sample_text(second)
    kinds = ["failed", "failed", "best", "worst"]
    assert steps_in(tmp_path) == [*((1, kind) for kind in kinds), (2, "failed")]
    with (tmp_path / "samples.jsonl").open("a") as half:
        half.write('{"step": 4, "kind"')
    writer_of(tmp_path).resume_at(2)
    assert steps_in(tmp_path) == [(1, kind) for kind in kinds]


def test_a_long_run_keeps_its_newest_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(tmp_path, per_step=1)
    writer.step(make_batch([[1.0]], 0), {}, {}, letters)
    size = (tmp_path / "samples.jsonl").stat().st_size
    monkeypatch.setattr(samples_module, "MAX_BYTES", 20 * size - 1)
    for step in range(1, 200):
        writer.step(make_batch([[1.0]], step), {}, {}, letters)
    steps = [step for step, _ in steps_in(tmp_path)]
    assert steps == [*range(201 - len(steps), 201)]
    assert 20 <= len(steps) <= 40
    writer.resume_at(steps[1])
    assert [step for step, _ in steps_in(tmp_path)] == steps[:1]


# st.text() would first spend seconds on a table of all characters
@given(codes=st.lists(st.integers(0, 0x10FFFF)))
def test_harmless_text_has_no_control_characters(codes: list[int]) -> None:
    found = harmless("".join(map(chr, codes)) + HOSTILE)
    assert all(one == "\n" or (one.isprintable() or one.isspace()) for one in found)
    assert not set(found) & set("\x1b\x07\r\u202e\x9b\u2028\x85")


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_the_console_shows_samples_with_hostile_text_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = Terminal(io.BytesIO(), encoding="ascii")
    console = Console("live", run_name="t", num_steps=300, max_staleness=4, file=out)
    now = [1000]
    clock = SimpleNamespace(monotonic=lambda: float(now[0]))
    monkeypatch.setattr("asyncrl.observe.console.time", clock)
    console.start()
    for step in range(1, 101):
        now[0] += 2
        console.show_samples(
            [a_sample(step, "best"), a_sample(step, text=HOSTILE + "\u20ac")]
        )
    console.close()
    out.seek(0)
    said = out.read()
    shown_of = [
        step for step in range(1, 101) if f"random sample of step {step}:" in said
    ]
    assert shown_of == [1, 11, 21], "every 20 s in the first minute, then every 300 s"
    for word in (
        r"\x1b[31m",
        "[red]red[/red]",
        ":smile:",
        r"\u202e",
        "| # no title",
        r"\u20ac",
    ):
        assert word in said
    assert not any(
        sequence in said for sequence in ("best sample", "\x1b[31m", "\x1b]0")
    )


def test_inspect_lists_the_newest_or_selected_samples(tmp_path: Path) -> None:
    make_run(tmp_path, 0)
    kinds = ("best", "worst")
    lines = [a_sample(step, kind, group_id=step) for step in range(8) for kind in kinds]
    append_lines(tmp_path / "samples.jsonl", [*lines, {"step": 1}])

    def listed(**asked: Any) -> list[str]:
        text = render_inspect(tmp_path, samples=True, **asked)
        return [
            line.partition(":")[0] for line in text.splitlines() if " of step " in line
        ]

    assert listed() == [
        f"{kind} sample of step {step}" for step in range(3, 8) for kind in kinds
    ]
    assert listed(kinds=["worst"]) == [
        f"worst sample of step {step}" for step in range(8)
    ]
    assert (
        listed(step=1)
        == listed(group=1)
        == ["best sample of step 1", "worst sample of step 1"]
    )
    found = json.loads(render_inspect(tmp_path, as_json=True, step=1, kinds=["best"]))
    assert (
        [sample["kind"] for sample in found["samples"]],
        len(found["problems"]),
    ) == (["best"], 1)
    with pytest.raises(ConfigError, match="has no such sample"):
        render_inspect(tmp_path, step=3, kinds=["failed"])


def test_tensorboard_gets_numbers_and_samples_as_verbatim_text(tmp_path: Path) -> None:
    tracker = TensorBoard()
    tracker.start(TrackedRun(tmp_path, "t", "1", {}))
    for step in (0, 99, 100, 101, 110, 1000, 1010, 1100):
        tracker.step(step, {"reward/mean": step / 4})
        tracker.samples(
            step, [a_sample(step, "best", text=HOSTILE), a_sample(step), a_sample(step)]
        )
    tracker.close("done")
    events = EventAccumulator(
        str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}
    ).Reload()
    assert [event.value for event in events.Scalars("reward/mean")[:3]] == [
        0.0,
        24.75,
        25.0,
    ]
    texts = events.Tensors("samples")
    assert [event.step for event in texts] == [0, 99, 100, 110, 1000, 1100]
    assert texts[0].tensor_proto.string_val[0].count(b"random sample of step 0") == 2
    lines = texts[0].tensor_proto.string_val[0].decode().split("\n")
    assert all(line.startswith("    ") for line in lines), "Markdown shows it verbatim"
