"""What is shown of rollouts: which ones, their text token by token, and the file that holds them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asyncrl.observe.trackers.tensorboard import TensorBoard
from buffer_groups import make_group
from hypothesis import given
from hypothesis import strategies as st
from journal_cases import make_rollout
from text_tokenizers import byte_fallback, byte_level, metaspace

from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.messages.calls import TrainResponse
from asyncrl.messages.records import Batch, GroupId, Prompt, Rollout, Trajectory, VersionSpan
from asyncrl.observe import sample_maker
from asyncrl.observe.console import Console
from asyncrl.observe.metrics import SpecialTokens
from asyncrl.observe.sample_maker import Chosen, SampleMaker, choose, pieces_of, shown
from asyncrl.observe.sample_text import harmless, headline, render_samples, sample_text
from asyncrl.observe.samples import SampleFile, ShownRollout, read_samples
from asyncrl.observe.trackers.tracker import TrackedRun
from asyncrl.rollouts.rollout import FailedRollout, Seen

TOKENIZERS = {made.__name__: made() for made in (byte_level, byte_fallback, metaspace)}
HOSTILE = (
    "\x1b[31m\x1b]0;owned\x07[red]red[/red] <script>alert(1)</script>\r\u202e :smile:\n\n# no title\n```\n"
)


class Letters:
    """A decoder: token 97 is `a`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def decode_prefixes(self, token_ids: Sequence[int]) -> list[str]:
        return [self.decode(token_ids[:end]) for end in range(1, len(token_ids) + 1)]


def prefixes(name: str, ids: Sequence[int]) -> list[str]:
    found = [ids[:end] for end in range(1, len(ids) + 1)]
    return list(TOKENIZERS[name].decode_batch(found, skip_special_tokens=False))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_the_pieces_of_any_tokens_join_to_their_text(name: str, data: st.DataObject) -> None:
    largest = TOKENIZERS[name].get_vocab_size() - 1
    ids = data.draw(st.lists(st.integers(0, largest), max_size=40))
    pieces = pieces_of(prefixes(name, ids))
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TOKENIZERS[name].decode(ids, skip_special_tokens=False)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
def test_a_character_of_several_tokens_is_the_piece_of_the_last_of_them(text: str) -> None:
    ids = TOKENIZERS["byte_level"].encode(text, add_special_tokens=False).ids
    pieces = pieces_of(prefixes("byte_level", ids))
    assert "".join(pieces) == text
    of_each = [TOKENIZERS["byte_level"].decode([one], skip_special_tokens=False) for one in ids]
    assert all(piece == own for piece, own in zip(pieces, of_each, strict=True) if "\ufffd" not in own)


def make_batch(rewards: Sequence[Sequence[float]], version: int = 3) -> Batch:
    groups = [make_group(n, *([[version]] * len(of)), rewards=of) for n, of in enumerate(rewards)]
    return Batch(version, tuple(groups), 0)


@given(
    rewards=st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    num=st.integers(0, 8),
    seed=st.integers(0, 3),
)
def test_the_best_and_the_worst_are_chosen_then_others_by_chance_always_the_same_ones(
    rewards: list[list[float]], num: int, seed: int
) -> None:
    batch, flat = make_batch(rewards), sum(rewards, [])
    found = choose(batch, num, seed, {(0, 0): 0.5})
    names = [(one.group_id, one.sample_index) for one in found]
    assert len(set(names)) == len(names) == min(num, len(flat))
    assert [one.kind for one in found] == ["best", "worst", *["random"] * num][: len(found)]
    ends = [max(flat), min(flat)]
    assert [one.rollout[0].reward for one in found[:2]] == ends[: len(found)]
    assert [one.gap for one in found] == [0.5 if name == (0, 0) else None for name in names]
    assert [(one.group_id, one.sample_index) for one in choose(batch, num, seed, {})] == names


def test_other_steps_and_seeds_show_other_rollouts() -> None:
    batches = [make_batch([[0.0] * 8] * 8, version) for version in range(8)]
    found = {choose(batch, 3, seed, {})[2][1:3] for batch in batches for seed in (0, 1)}
    assert len(found) > 8, "equal rewards are told apart by chance, too"


def chosen(rollout: Rollout, **more: Any) -> Chosen:
    given: dict[str, Any] = {"kind": "random", "step": 10, "min_version": 7, "prompt": Prompt("0/4", ())}
    return Chosen(group_id=GroupId(5), sample_index=0, rollout=rollout, **given | more)


def turns(*lengths: int, versions: Callable[[int], int] = lambda place: 8, **more: Any) -> Trajectory:
    """Stretches of these lengths, every other one sampled, the first is the prompt; one letter a token."""
    mask = np.concatenate([np.full(num, n % 2 == 1) for n, num in enumerate(lengths)])
    places = np.flatnonzero(mask).tolist()
    spans = tuple(VersionSpan(place, place + 1, versions(place)) for place in places)
    ids = (97 + np.arange(len(mask)) % 26).astype(np.int32)
    return Trajectory(0, ids, mask, np.where(mask, -0.5, 0.0).astype(np.float32), spans, 0.25, **more)


def test_every_turn_of_every_branch_is_shown_with_the_version_and_mask_of_each_sampled_token() -> None:
    main = turns(3, 2, 2, 2, versions=lambda place: 6 if place == 3 else 8, metrics={"solved": 1.0})
    ids = np.concatenate([main.token_ids[:5], np.array([65, 66, 67], np.int32)])
    mask = np.array([False] * 6 + [True] * 2)
    fork = replace(main, token_ids=ids, loss_mask=mask, behaviour_logprobs=mask * np.float32(-1.0), branch=1)
    fork = replace(fork, version_spans=(VersionSpan(6, 8, 8),), is_truncated=True, num_interruptions=2)
    sample = shown(chosen((main, fork), gap=0.01), Letters())
    first, second = sample["branches"]
    texts = [(one["is_sampled"], one["text"]) for one in first["stretches"]]
    assert texts == [(False, "abc"), (True, "de"), (False, "fg"), (True, "hi")]
    turn = first["stretches"][1]
    assert (turn["versions"], turn["in_loss"], turn["pieces"]) == ([6, 8], [False, True], ["d", "e"])
    assert turn["logprobs"] == [-0.5, -0.5]
    assert (second["parent"], second["num_shared"], second["num_tokens"]) == (0, 5, 8)
    assert [one["text"] for one in second["stretches"]] == ["A", "BC"]
    assert sample["spans"] == [(0, 1, 6), (1, 6, 8)]
    assert (sample["staleness"], sample["reward"], sample["metrics"]) == (1, 0.25, {"solved": 1.0})
    assert (sample["is_truncated"], sample["num_interruptions"], sample["num_sampled"]) == (True, 2, 6)
    text = sample_text(sample)
    assert "versions 6..8, staleness 1, 6 tokens, logprob gap 0.01, truncated, 2 interruptions" in text
    lines = [" ".join(line.split()) for line in text.splitlines()[1:]]
    assert lines == [
        *("prompt | abc", "model v6* | d", "model v8 | e", "context | fg", "model v8 | hi"),
        *("branch 1 forks from branch 0 after 5 tokens", "prompt | A", "model v8 | BC"),
    ]


def test_rewards_of_single_turns_are_shown_beside_their_tokens() -> None:
    rollout = make_rollout(8, 0, has_credits=True)
    branch = shown(chosen(rollout), Letters())["branches"][0]
    expected = [(credit.start, credit.end, credit.reward) for credit in rollout[0].credits]
    assert branch["credits"] == expected


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=12), num_turns=st.integers(0, 300))
def test_long_rollouts_are_cut_and_no_token_is_left_out_unsaid(lengths: list[int], num_turns: int) -> None:
    branch = turns(*lengths, *[3] * num_turns)
    (one,) = shown(chosen((branch,)), Letters())["branches"]
    told = sum(len(stretch["text"]) + stretch.get("cut", 0) for stretch in one["stretches"])
    assert told == one["num_tokens"] == len(branch.token_ids)
    num_shown = sum(len(stretch["text"]) for stretch in one["stretches"])
    assert num_shown <= sample_maker.MAX_TOKENS + sample_maker.MAX_STRETCH
    assert one["stretches"][-1]["text"][-1] == chr(branch.token_ids[-1]), "the end is what was answered"
    if len(branch.token_ids) <= sample_maker.MAX_STRETCH:
        assert num_shown == told


def test_long_and_many_messages_and_branches_are_cut_and_say_so() -> None:
    messages = tuple({"role": "user", "content": f"{n} " * 4000} for n in range(100))
    prompt = Prompt("0/4", messages, answer={"a": "\ud800"})
    sample = shown(chosen(tuple(turns(1, 2, branch=n) for n in range(20)), prompt=prompt), Letters())
    assert len(sample["branches"]) + sample["cut_branches"] == 20
    assert "60 messages are left out" in str(sample["messages"])
    assert all(len(message["content"]) < 5000 for message in sample["messages"])
    json.dumps(sample).encode()
    assert "branches that are not in samples.jsonl: 4" in sample_text(sample)


def a_sample(step: int, kind: Any = "random", group_id: int = 0, text: str = "hi") -> ShownRollout:
    rollout = replace(turns(1, len(text)), token_ids=np.array([120, *map(ord, text)], np.int32))
    one = chosen((rollout,), step=step, kind=kind, prompt=Prompt("0/4", ({"role": "user", "content": text},)))
    return {**shown(one, Letters()), "group_id": group_id}


def steps_in(folder: Path) -> list[tuple[int, str]]:
    problems: list[str] = []
    found = [(sample["step"], sample["kind"]) for sample in read_samples(folder, problems)]
    assert problems == []
    return found


def test_steps_that_are_taken_again_replace_their_samples_and_what_failed_stays(tmp_path: Path) -> None:
    file = SampleFile(tmp_path)
    for step in range(4):
        file.append([a_sample(step, "failed", 10 + step), a_sample(step, "best"), a_sample(step, "worst")])
    with file.path.open("a") as half:
        half.write('{"step": 4, "kind"')
    file = SampleFile(tmp_path)
    assert file.goes_on_at(2, keeps_failed=True) == {(10 + step, 0) for step in range(4)}
    file.append([a_sample(2, "best")])
    before = [(step, kind) for step in (0, 1) for kind in ("failed", "best", "worst")]
    assert steps_in(tmp_path) == [*before, (2, "failed"), (2, "best"), (3, "failed")]
    file.goes_on_at(2, keeps_failed=False)
    assert steps_in(tmp_path) == before
    file.path.write_bytes(file.path.read_bytes() + b'{"half')
    SampleFile(tmp_path).append([a_sample(2)])
    problems: list[str] = []
    assert len(read_samples(tmp_path, problems)) == 7
    assert [problem[:37] for problem in problems] == ["a line of samples.jsonl is no JSON obj"[:37]]
    assert [path.name for path in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_file_that_grows_too_large_keeps_its_newest_steps_and_ever_fewer_old_ones(tmp_path: Path) -> None:
    size = len(json.dumps(a_sample(100))) + 1
    file = SampleFile(tmp_path, max_bytes=40 * size)
    for step in range(1000):
        file.append([a_sample(step)])
        assert file.path.stat().st_size <= 40 * size
    steps = [step for step, _ in steps_in(tmp_path)]
    assert steps[-6:] == list(range(994, 1000))
    assert (steps[0], steps == sorted(set(steps))) == (0, True)
    halves = [sum(low <= step < low + 250 for step in steps) for low in (0, 250, 500, 750)]
    assert halves[-1] > halves[0] > 0
    newest = read_samples(tmp_path, [], newest=3)
    assert [sample["step"] for sample in newest] == [997, 998, 999]


def test_a_file_that_is_none_or_of_wrong_lines_is_told(tmp_path: Path) -> None:
    assert read_samples(tmp_path, []) == []
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\nno\n' + json.dumps(a_sample(1)) + '\n{"step"')
    problems: list[str] = []
    assert len(read_samples(tmp_path, problems)) == 1
    assert len(problems) == 3


def maker_of(folder: Path, **more: Any) -> SampleMaker:
    return SampleMaker(folder, **{"seed": 1, "per_step": 3, "failed_per_step": 2, **more})


def trained(**more: Any) -> TrainResponse:
    return TrainResponse(policy_version=1, metrics={}, **more)


def fail(maker: SampleMaker, group_id: int, rollout: Callable[[], Rollout] = tuple) -> None:
    prompt = Prompt("0/7", ({"role": "user", "content": "why"},), answer="so")
    failed = FailedRollout(1, 2, RolloutFailure("no reward"), Seen(rollout))
    maker.failed(GroupId(group_id), prompt, failed, Letters())


def nothing() -> Rollout:
    raise RolloutFailure("nothing was sampled")


def test_failed_rollouts_are_shown_at_once_a_few_between_two_steps_and_once_over_a_resume(
    tmp_path: Path,
) -> None:
    maker = maker_of(tmp_path)
    fail(maker, 1, lambda: (turns(2, 3),))
    fail(maker, 2, nothing)
    fail(maker, 3)
    maker.flush()
    assert steps_in(tmp_path) == [(1, "failed")] * 2
    maker.step(make_batch([[0.0, 1.0, 2.0, 3.0]], version=0), trained(rollout_gaps=[(0, 3, 0.25)]), Letters())
    fail(maker, 4)
    maker.close()
    assert [(made.step, len(made.samples)) for made in maker.taken()] == [(1, 1), (1, 1), (1, 3), (2, 1)]
    first, second, best, *_ = read_samples(tmp_path, [])
    assert first["error"] is not None
    assert "failed 2 times, last: no reward" in first["error"]
    assert (first["reward"], first["staleness"], first["num_sampled"], second["branches"]) == (
        None,
        None,
        3,
        [],
    )
    assert first["branches"][0]["stretches"][1].get("in_loss") == [False] * 3
    assert (best["reward"], best["logprob_gap"], best["sample_index"]) == (3.0, 0.25, 3)
    texts = [sample_text(sample) for sample in (first, second)]
    assert "model v8* | cde" in texts[0]
    assert all(words in texts[1] for words in ("failed rollout of step 1", "no reward", "user | why", "| so"))

    again = maker_of(tmp_path)
    again.goes_on_at(1, keeps_failed=True)
    fail(again, 4)  # its failure was not durable at the kill
    again.step(make_batch([[0.0, 1.0, 2.0, 3.0]], version=0), trained(), Letters())
    again.close()
    kinds = ["failed", "failed", "best", "worst", "random"]
    assert steps_in(tmp_path) == [*((1, kind) for kind in kinds), (2, "failed")]


def test_a_sample_shows_its_group_with_the_advantages_of_the_trainer(tmp_path: Path) -> None:
    maker = maker_of(tmp_path, per_step=1)
    batch = make_batch([[0.0, 1.0, 2.0]], version=0)
    long = replace(turns(2, 600, versions=lambda place: 0), sample_index=1, reward=1.0)
    first, _, last = batch.groups[0].trajectories
    batch = replace(batch, groups=(replace(batch.groups[0], trajectories=(first, long, last)),))
    report = trained(rollout_advantages=[(0, 0, -1.5), (0, 2, 1.5), (7, 1, 9.0)])
    maker.step(batch, report, Letters())
    maker.close()
    (sample,) = read_samples(tmp_path, [])
    group = sample.get("group", [])
    assert [(each["sample_index"], each["reward"], each["advantage"]) for each in group] == [
        (0, 0.0, -1.5),
        (1, 1.0, None),
        (2, 2.0, 1.5),
    ]
    assert len(group[1]["text"]) < 400
    assert " … " in group[1]["text"]


def test_special_tokens_are_recorded_and_stray_ones_counted() -> None:
    special = SpecialTokens(end_ids=frozenset(b"d"), stray_ids=frozenset(b"c"))
    sample = shown(chosen((turns(1, 3, 1, 1),), special=special), Letters())
    stretches = [part for part in sample["branches"][0]["stretches"] if part["is_sampled"]]
    assert [(part["text"], part.get("special")) for part in stretches] == [("bcd", [1, 2]), ("f", None)]
    assert sample.get("num_stray") == 1
    plain = shown(chosen((turns(1, 3),)), Letters())
    assert ("num_stray" in plain, "group" in plain) == (False, False)


def test_what_cannot_be_written_or_made_in_time_is_told_and_the_next_step_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = maker_of(tmp_path)
    (tmp_path / "samples.jsonl").mkdir()
    maker.step(make_batch([[1.0]], 0), trained(), Letters())
    maker.flush()
    (tmp_path / "samples.jsonl").rmdir()
    (broken,) = maker.taken()
    assert broken.problem.startswith("no samples of step 1 in samples.jsonl: [Errno 21]")
    maker.step(make_batch([[1.0]], 1), trained(), Letters())
    monkeypatch.setattr(sample_maker, "MAX_WAITING", 1)
    maker.step(make_batch([[1.0]], 2), trained(), Letters())
    maker.close()
    assert [(made.step, bool(made.problem)) for made in maker.taken()] == [(3, True), (2, False)]
    assert steps_in(tmp_path) == [(2, "best")]


def test_without_samples_no_file_is_made(tmp_path: Path) -> None:
    maker = maker_of(tmp_path, per_step=0, failed_per_step=0)
    maker.goes_on_at(1, keeps_failed=True)
    maker.step(make_batch([[1.0]], 0), trained(), Letters())
    fail(maker, 1)
    maker.close()
    assert (maker.taken(), list(tmp_path.iterdir())) == ([], [])


@given(text=st.text())
def test_a_harmless_text_has_no_control_character_but_the_line_end(text: str) -> None:
    found = harmless(text + HOSTILE)
    assert all(one == "\n" or (one.isprintable() or one.isspace()) for one in found)
    assert not set(found) & set("\x1b\x07\r\u202e\x9b\u2028\x85")


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_the_console_shows_a_sample_now_and_then_and_hostile_text_as_it_is(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Terminal(io.BytesIO(), encoding="ascii") if kind == "live" else io.StringIO()
    names = {"run_name": "t", "num_steps": 300, "max_staleness": 4}
    console = Console(kind, **names, samples_every="auto", file=out)
    clock = SimpleNamespace(monotonic=lambda: float(now[0]))
    now = [1000]
    monkeypatch.setattr("asyncrl.observe.console.time", clock)
    console.start()
    for step in range(1, 301):
        now[0] += 2
        random = a_sample(step, text=HOSTILE + "\u20ac")
        console.show_samples(step, [a_sample(step, "best"), random])
        console.show_samples(step, [a_sample(step, "failed")])
    console.close()
    out.seek(0)
    said = out.read()
    shown_of = [step for step in range(1, 301) if f"random sample of step {step}:" in said]
    assert shown_of == [1, 11, 21, 171], "after 20 s, and after a minute every 5 minutes"
    assert said.count("failed rollout of step 1:") == said.count("failed rollout") == 1
    assert "best sample" not in said
    for word in (r"\x1b[31m", r"\x07", "[red]red[/red]", "<script>", ":smile:", r"\u202e", "| # no title"):
        assert word in said
    assert "\x1b[31m" not in said
    assert "\x1b]0" not in said
    assert ("\\u20ac" in said) == (kind == "live"), "a terminal that does not know the character"


@pytest.mark.parametrize(("every", "steps"), [(None, []), (7, [7, 14])])
def test_the_console_shows_none_or_one_every_so_many_steps(every: int | None, steps: list[int]) -> None:
    out = io.StringIO()
    console = Console("plain", run_name="t", num_steps=20, max_staleness=4, samples_every=every, file=out)
    for step in range(1, 21):
        console.show_samples(step, [a_sample(step)])
    if every is None:
        console.show_samples(21, [a_sample(21, "failed")])
    said = out.getvalue()
    assert [step for step in range(1, 22) if f" of step {step}:" in said] == steps


def test_samples_are_listed_as_text_the_newest_or_those_that_are_asked_for(tmp_path: Path) -> None:
    SampleFile(tmp_path).append(
        [a_sample(step, kind, group_id=step) for step in range(8) for kind in ("best", "worst")]
    )

    def listed(**asked: Any) -> list[str]:
        text = render_samples(tmp_path, [], as_json=False, **asked)
        return [line.partition(":")[0] for line in text.splitlines() if " of step " in line]

    assert listed() == [f"{kind} sample of step {step}" for step in range(3, 8) for kind in ("best", "worst")]
    assert listed(kinds=["worst"]) == [f"worst sample of step {step}" for step in range(8)]
    both = ["best sample of step 1", "worst sample of step 1"]
    assert listed(step=1) == listed(group=1) == both
    found = json.loads(render_samples(tmp_path, ["damaged"], as_json=True, step=1, kinds=["best"]))
    assert ([sample["kind"] for sample in found["samples"]], found["problems"]) == (["best"], ["damaged"])
    assert render_samples(tmp_path, [], as_json=False, kinds=["failed"]).endswith("no failed sample so far")
    with pytest.raises(ConfigError, match="has no failed sample of step 3"):
        render_samples(tmp_path, [], as_json=False, step=3, kinds=["failed"])


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer")
def test_tensorboard_has_the_text_of_samples_of_ever_fewer_steps_and_shows_markup_as_text(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    tracker = TensorBoard()
    tracker.start(TrackedRun(tmp_path, "t", "1", {}))
    for step in (0, 99, 100, 101, 110, 1000, 1010, 1100):
        tracker.samples(step, [a_sample(step, "best", text=HOSTILE), a_sample(step), a_sample(step)])
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    assert events.Tags()["tensors"] == ["samples/best", "samples/random"]
    best, random = (events.Tensors(f"samples/{kind}") for kind in ("best", "random"))
    assert [event.step for event in best] == [0, 99, 100, 110, 1000, 1100]
    assert random[0].tensor_proto.string_val[0].count(b"random sample of step 0") == 2
    html = markdown_to_safe_html(best[0].tensor_proto.string_val[0])
    assert "&lt;script&gt;" in html
    assert html.count("<pre>") == 1
    assert not any(tag in html for tag in ("<script", "<h1", "\x1b"))


def test_a_headline_is_one_line_whatever_names_are_in_it() -> None:
    sample = a_sample(1) | {"metrics": {"a\nb\x1b": 1.0}, "prompt_id": "x\ny"}
    assert "\n" not in headline(sample)  # type: ignore[arg-type]
    assert "\x1b" not in headline(sample)  # type: ignore[arg-type]
