"""Real runs that are killed, copied, damaged or colocated end where an undisturbed run
ends, which equals the plain synchronous loop. `make fuzz` does hundreds of kills.
"""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from conftest import NUM_STEPS
from crash_fuzz import (
    PATIENCE_S,
    Crashes,
    differences,
    fuzz_config,
    killed_on_the_way,
    never_killed,
    new_seed,
    promise_of,
)
from held_task import hold, release
from job_runs import (
    RUN,
    children_of,
    engine_events,
    environment,
    read_lines,
    roomy,
    run,
    staging_of,
    start,
    variant,
    wait_for_steps,
    wait_until,
    write_config,
)
from needed_extensions import NAMED
from process_ends import all_gone
from resume_checker import read_evidence, violations
from safetensors.numpy import load_file, save_file
from sync_run import SyncRun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl.config import load_config
from asyncrl.job.resume import FIXED
from asyncrl.journal.read import costs_of, reading
from asyncrl.messages.records import Completion
from asyncrl.observe.report_page import view_run
from asyncrl.observe.timeline import read_timeline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_on_policy_run_equals_the_plain_loop_bit_for_bit(
    whole: Path, tmp_path: Path
) -> None:
    """Completions of the first steps are sampled one after the other."""
    reference = tmp_path / "reference"
    sync = SyncRun(load_config(whole / "config.yaml"), reference)
    honest = sync.generate

    def generate(requests: Sequence[tuple[Sequence[int], int]]) -> list[Completion]:
        sync.one_by_one = sync.trainer.policy_version < 3
        return honest(requests)

    sync.generate = generate  # type: ignore[method-assign]
    try:
        sync.steps()
    finally:
        sync.close()
    assert len(read_lines(whole / "trained.jsonl")) == NUM_STEPS
    assert differences(reference, whole, of_metrics=False) == []


def test_one_other_token_or_weight_is_a_difference(whole: Path, tmp_path: Path) -> None:
    other = shutil.copytree(whole, tmp_path / "other")
    lines = read_lines(other / "trained.jsonl")
    lines[2]["trajectories"][0]["tokens_sha"] = "0" * 16
    (other / "trained.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    weights = load_file(other / "final" / "model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name] + 1
    save_file(weights, other / "final" / "model.safetensors")
    assert differences(other, whole) == ["step 2: trajectories", f"weights: {name}"]


PLANTED = [
    ("DELETE FROM groups WHERE group_id = 9", "group 10 has draw"),
    (
        "UPDATE groups SET state = 'failed' WHERE group_id = 9",
        "is lost: group 9 is failed",
    ),
    ("DELETE FROM batch_groups WHERE group_id = 9", "groups, 4 and 4 are expected"),
    ("DELETE FROM batches WHERE version = 2", "the journal's batches are [0, 1, 3,"),
    (
        "UPDATE batches SET min_version = 1 WHERE version = 3",
        "batch 3 has min_version 1",
    ),
    (
        "UPDATE trajectories SET blob = (SELECT blob FROM trajectories)",
        "on other tokens or rewards",
    ),
    ((3, {"version": 5}), "line 4 is of batch 5, after batch 2"),
    ((3, {"trajectories": []}), "trained were []"),
    ((4, {"restored": 9}), "line 5 goes on from version 9, which was never reached"),
    ((4, {"restored": 2}), "line 6 is of batch 5, after batch 1"),
]


@pytest.mark.parametrize(("fault", "words"), PLANTED)
def test_checker_finds_a_planted_fault(
    whole: Path, on_policy: Path, tmp_path: Path, fault: Any, words: str
) -> None:
    for name in ("journal.sqlite", "trained.jsonl"):
        shutil.copy(whole / name, tmp_path)
    if isinstance(fault, str):
        with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
            assert connection.execute(fault).rowcount > 0
        connection.close()
    else:
        lines = read_lines(tmp_path / "trained.jsonl")
        lines[fault[0]].update(fault[1])
        (tmp_path / "trained.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    found = violations(
        read_evidence(tmp_path), promise_of(on_policy), num_steps=NUM_STEPS
    )
    assert any(words in violation for violation in found), found


def test_finished_run_leaves_whole_files(whole: Path, on_policy: Path) -> None:
    assert (
        violations(read_evidence(whole), promise_of(on_policy), num_steps=NUM_STEPS)
        == []
    )
    summary = json.loads((whole / "summary.json").read_text())
    assert (summary["state"], summary["warnings"]) == ("done", [])
    samples = read_lines(whole / "samples.jsonl")
    kinds = ("best", "worst", "random")
    assert [(one["step"], one["kind"]) for one in samples] == [
        *product(range(1, NUM_STEPS + 1), kinds)
    ]
    assert all(
        0 <= one["logprob_gap"] < 1e-4 and one["staleness"] == 0 for one in samples
    )
    assert "random sample of step 1: reward " in (whole.parent / "said.txt").read_text()
    events = EventAccumulator(str(whole / "tensorboard")).Reload()
    assert events.Tags()["tensors"] == ["samples"]
    assert (whole / "final" / "config.json").is_file()
    assert (whole / "checkpoints" / f"step_{NUM_STEPS}" / "manifest.json").is_file()


def test_the_timeline_of_a_real_run_agrees_with_its_metrics(whole: Path) -> None:
    view = view_run(whole)
    # some had no pause
    lanes = [
        lane for lane in view["timeline"]["lanes"] if not lane.startswith("engine")
    ]
    expected = ["trainer", "weight sync", "checkpoints", "evaluations", "restarts"]
    assert (view["problems"], lanes) == ([], expected)
    assert view["gauges"].keys() == view["curves"].keys(), "every metric is declared"
    by_step = defaultdict[int, dict[str, float]](lambda: defaultdict(float))
    for row in read_timeline(whole, []):
        if row.lane == "trainer" and row.kind not in ("copy", "record"):
            by_step[row.number][row.kind] += row.seconds
    for step in read_lines(whole / "metrics.jsonl"):
        spans = by_step[step["step"] - 1]
        assert spans["wait for generation"] == pytest.approx(
            step["perf/wait_generation_s"], abs=1e-4
        )
        assert spans["pack"] + spans["train"] == pytest.approx(
            step["perf/train_s"] + step["perf/request_s"], abs=1e-4
        )
        assert spans["journal"] == pytest.approx(step["perf/journal_s"], abs=1e-4)
        assert sum(spans.values()) <= step["perf/step_s"] + 1e-3


@pytest.fixture(scope="module")
def killed(on_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed with all its processes, and two
    checkpoints in it or three.
    """
    run_dir = tmp_path_factory.mktemp("killed") / "run"

    # the older ones are removed a moment later, and one more may come before the kill
    def has_two() -> bool:
        return len(checkpoints(run_dir)) >= 2 and checkpoints(run_dir)[-1] >= 6

    killed_on_the_way(lambda: start(on_policy, run_dir), has_two, run_dir)
    return run_dir


@pytest.fixture
def run_dir(killed: Path, tmp_path: Path) -> Path:
    """A copy of it elsewhere, to be damaged and gone on with."""
    return Path(shutil.copytree(killed, tmp_path / "another machine" / "run"))


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step_"))
        for path in (run_dir / "checkpoints").glob("step_*")
    )


def goes_on(config: Path, run_dir: Path, *options: str) -> str:
    """What a resume says that gets to the end."""
    answer = run(config, run_dir, *options)
    assert answer.returncode == 0, (answer.stderr, answer.stdout)
    return answer.stdout


def assert_nothing_lost(config: Path, run_dir: Path) -> None:
    assert (
        violations(read_evidence(run_dir), promise_of(config), num_steps=NUM_STEPS)
        == []
    )


def test_copied_run_resumes_from_the_checkpoint_before_a_corrupt_one(
    whole: Path, run_dir: Path
) -> None:
    *_, older, newest = checkpoints(run_dir)
    files = (run_dir / "checkpoints" / f"step_{newest}" / "trainer").iterdir()
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = goes_on(run_dir / "config.yaml", run_dir, "--resume", "must")
    assert f"step_{newest} is damaged: trainer/{file.name} " in said.replace("\n", " ")
    assert f"resuming from policy_version {older}" in said
    assert differences(whole, run_dir) == []
    assert_nothing_lost(run_dir / "config.yaml", run_dir)


def test_without_any_checkpoint_the_journal_is_enough(
    on_policy: Path, whole: Path, run_dir: Path
) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    first_life = read_timeline(run_dir, [])
    num_batches = len(read_evidence(run_dir).batches)
    assert "resuming from policy_version 0" in goes_on(on_policy, run_dir)
    assert differences(whole, run_dir) == []
    assert_nothing_lost(on_policy, run_dir)
    for step in read_lines(run_dir / "metrics.jsonl"):
        assert step["perf/step_s"] >= step["perf/train_s"]
    both = read_timeline(run_dir, problems := [])
    assert (both[: len(first_life)], problems) == (first_life, []), (
        "spans of the first life stay"
    )
    saved = [row.number for row in both[len(first_life) :] if row.kind == "checkpoint"]
    assert saved[0] == num_batches, "the next catch-up begins there"
    shown = view_run(run_dir)["timeline"]
    names = [shown["kinds"][kind]["name"] for _, kind, *_ in shown["spans"]]
    assert names.count("start") == 2
    assert "train again" in names


HOSTILE = """
    import os, signal, sys
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.SIGRTMAX))
    os.execv(sys.executable, sys.argv[1:])
"""


def start_by_hostile_parent(config: Path, run_dir: Path) -> subprocess.Popen[str]:
    """Start a run from a program that ignores and blocks signals."""
    hostile = [sys.executable, "-c", textwrap.dedent(HOSTILE)]
    run_command = [*RUN, str(config), "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        hostile + run_command,
        env=environment(HELD_RUN_DIR=str(run_dir)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return roomy(process)


def test_signal_to_all_processes_makes_a_checkpoint(
    on_policy: Path, whole: Path, tmp_path: Path
) -> None:
    """As systemd, scancel, Slurm's --signal and a closed terminal send them."""
    run_dir = tmp_path / "run"
    is_hung_up = signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    lives = [
        (start, signal.SIGTERM),
        # Under nohup SIGHUP is ignored.
        (start, signal.SIGHUP if is_hung_up else signal.SIGUSR2),
        (start_by_hostile_parent, signal.SIGUSR1),
    ]
    for number, (begin, sent) in enumerate(lives, 1):
        hold(run_dir, 3 * number)
        process = begin(on_policy, run_dir)
        wait_for_steps(run_dir, 3 * number, process)
        if begin is start_by_hostile_parent:
            for ignored in (signal.SIGINT, signal.SIGHUP):
                process.send_signal(ignored)
        controller = psutil.Process(process.pid)
        tree = [controller, *controller.children(recursive=True)]
        for member in tree:
            member.send_signal(sent)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, "restarting" in stdout) == (143, False), stderr
        assert all_gone(tree)
        reason = json.loads((run_dir / "status.json").read_text())["why"]
        assert reason == f"interrupted by {sent.name}"
        assert checkpoints(run_dir)[-1] == 3 * number
    release(run_dir)
    process = start_by_hostile_parent(on_policy, run_dir)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert differences(whole, run_dir) == []


RESIDENT = {"rollout": "trainer"}


@pytest.mark.parametrize(
    "placement", [{}, RESIDENT | {"share": "none"}], ids=["apart", "moving"]
)
def test_killed_run_ends_the_same_and_evaluates_each_version_once(
    on_policy: Path, whole: Path, tmp_path: Path, placement: dict[str, Any]
) -> None:
    """Its rollout engines evaluate every version."""
    config = variant(
        on_policy,
        tmp_path,
        placement=placement,
        rollout={"num_engines": 2},
        eval={"engine": "rollout", "every": 1},
    )
    victims = ["trainer", "engine", "stop"] if placement else ["controller"]
    crashes = Crashes(config, tmp_path / "run", seed=new_seed(), victims=victims)
    assert crashes.live()
    assert differences(whole, tmp_path / "run") == []
    logs = tmp_path / "run" / "logs"
    assert not (logs / "engine-eval.log").exists()
    assert "all parts are trained again" not in (logs / "trainer-0.log").read_text()
    rewards, expected = evaluated(tmp_path / "run"), evaluated(whole)
    assert {0, NUM_STEPS} <= rewards.keys()
    assert {version: rewards[version] for version in rewards.keys() & expected} == {
        version: expected[version] for version in rewards.keys() & expected
    }
    # A step's line has the newest evaluation since the last line: two may end within
    # one step.
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    shown = [
        (line["eval/version"], line["eval/reward_mean"])
        for line in lines
        if "eval/version" in line
    ]
    assert shown == sorted(set(shown))
    assert set(shown) <= set(rewards.items())
    assert len(shown) >= NUM_STEPS / 2


@pytest.mark.rotated
def test_killed_run_of_muon_ends_the_same(on_policy: Path, tmp_path: Path) -> None:
    config = variant(on_policy, tmp_path, trainer={"optimizer": "muon"})
    undisturbed = never_killed(config, tmp_path / "undisturbed")
    run_dir = tmp_path / "run"
    assert Crashes(config, run_dir, seed=new_seed(), victims=["tree", "trainer"]).live()
    assert differences(undisturbed, run_dir) == []


TEMPLATE = """
{%- for m in messages %}<|user|>{{ m.content }}<|im_end|>{% endfor %}
{%- if ask or add_generation_prompt %}<|assistant|>{% endif %}"""
CHANGED = """
model: {dtype: bfloat16, chat_template: chat.jinja, chat_template_kwargs: {ask: true}}
task: {python: "asyncrl.tasks.toy:Letters", args: {letters: abcd}, system_prompt: ab}
generator: {python: "agents_for_test:two_turns", args: {bonus: 0.1}, outcomes: none,
  on_timeout: score, give_answer: true}
gateway: {on_sampling_override: honour, max_rollout_tokens: 90, thoughts: as_template,
  thoughts_field: reasoning_content, parse_special_tokens: false, tool_format: none}
rollout: {group_size: 8, num_engines: 2, max_tokens: 20, max_prompt_tokens: 64, top_p: 0.9, top_k: 9,
  min_p: 0.01, retries: 3, deterministic: false, threads: 2}
buffer: {max_staleness: 1, look_ahead: 0, on_overdue: mask, filter: equal_rewards}
trainer: {num_groups: 2, num_steps: 6, mini_batches: 2, epochs: 2, learning_rate: 1.0e-3, schedule: linear,
  warmup_steps: 2, threads: 2, weight_decay: 0.01, betas: [0.9, 0.95], max_grad_norm: 0.5,
  deterministic: false}
algorithm: {advantage: rloo, loss: cispo, correction: tis, ratio: proximal, aggregate: sequence,
  clip_low: 0.1,
  off_policy_mask: 0.5, top_entropy: 0.5, importance_cap: 3.0, proximal: interpolate, kl_coefficient: 0.01,
  kl_estimator: k2, kl_weighted: false, overlong_tokens: 4, reward_weight: 2.0}
eval: {task: {python: "asyncrl.tasks.toy:Letters"}, every: 2, num_prompts: 4}
weight_sync: {interrupt: abort}
"""
OF_OTHER_PROGRAMS = """
    task.name task.files task.dataset task.split task.reasoning_gym task.verifiers task.generator task.limits
    task.algorithm task.prompt_column task.answer_column task.reward task.special_tokens generator.command
    generator.verifiers generator.openenv generator.remote generator.env generator.pass_env generator.sandbox
    generator.sandbox_paths generator.max_memory_mb generator.worker_python generator.stop rollout.engine
    rollout.simulated rollout.vllm trainer.router_aux_loss algorithm.clip_high algorithm.clip_delta
    algorithm.kl_in algorithm.distill_beta algorithm.gae_lambda algorithm.discount algorithm.whiten_advantages
    algorithm.turn_discount algorithm.rewards task.reward_weights eval.name
    eval.at_start eval.engine eval.samples eval.temperature eval.top_p eval.top_k eval.min_p eval.slots
    eval.timeout_s
""".split()
"""Keys of other sources of prompts, rewards, harnesses, engines, losses and models."""


@pytest.mark.extension(*NAMED)
def test_allowed_changes_train_on(tmp_path: Path) -> None:
    """Each key that a resume may change is here, but for OF_OTHER_PROGRAMS."""
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    changes = yaml.safe_load(CHANGED.replace("chat.jinja", str(template)))
    task = {"python": "held_task:HeldLetters", "size": 200}
    trainer = {"num_steps": 4}
    config = write_config(
        tmp_path, task=task, buffer={"max_staleness": 2}, trainer=trainer
    )
    changed = variant(config, tmp_path / "changed", **changes)
    left = {
        f"{name}.{key}"
        for name, section in load_config(changed)
        for key in getattr(type(section), "model_fields", ())
        if section.free_keys != "*"
        and key not in (*section.free_keys, *changes.get(name, ()))
    }
    assert left - FIXED.keys() == {*OF_OTHER_PROGRAMS}
    run_dir = tmp_path / "run"
    hold(run_dir, 3)
    process = start(config, run_dir)
    wait_for_steps(run_dir, 3, process)
    # Other training begins at a checkpoint, which a stop makes.
    process.send_signal(signal.SIGINT)
    process.communicate()
    release(run_dir)
    allowed = [word for name in changes for word in ("--allow-change", name)]
    answer = run(changed, run_dir, *allowed)
    assert answer.returncode == 0, answer.stderr
    assert len(read_lines(run_dir / "metrics.jsonl")) == 6


@pytest.mark.rotated
def test_killed_run_keeps_counts_that_no_row_has(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        task={"python": "held_task:PickyLetters", "size": 200},
        rollout={"retries": 30},
        trainer={"num_steps": 4},
    )
    run_dir = tmp_path / "run"
    log = run_dir / "logs" / "controller.log"

    def num_retried() -> int:
        return log.read_text().count(" of 31 failed (") if log.exists() else 0

    def is_durable() -> bool:
        with reading(run_dir / "journal.sqlite") as connection:
            return costs_of(connection).get("rollout/retried") == num_retried()

    hold(run_dir, 0)
    process = start(config, run_dir)
    wait_until(lambda: num_retried() > 0 and is_durable(), process)
    process.kill()
    process.communicate()
    release(run_dir)
    before = num_retried()
    assert run(config, run_dir).returncode == 0
    last = read_lines(run_dir / "metrics.jsonl")[-1]
    assert last["rollout/retried"] == num_retried() > before


def evaluated(run_dir: Path) -> dict[int, float]:
    """Return the reward of each evaluated version. Each was evaluated once, in order."""
    lines = read_lines(run_dir / "eval.jsonl")
    versions = [line["policy_version"] for line in lines]
    assert versions == sorted(set(versions))
    return {line["policy_version"]: line["eval/reward_mean"] for line in lines}


@pytest.mark.rotated
@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_run_without_files_trains_the_same_through_kills(
    on_policy: Path, whole: Path, tmp_path: Path, transport: str
) -> None:
    """This run broadcasts or shares the weights that the trainer holds; the reference
    run used files.
    """
    sent = {"weight_sync": {"transport": transport}, "supervision": {"backoff_s": 0.1}}
    config = variant(on_policy, tmp_path, rollout={"num_engines": 2}, **sent)
    run_dir = tmp_path / "run"
    hold(run_dir, 10)
    process = start(config, run_dir)
    wait_for_steps(run_dir, 2, process)
    (engine,) = children_of(process, "specs/engine-1.json")
    engine.kill()
    wait_until(lambda: ("engine up", "engine-1") in engine_events(run_dir), process)
    (trainer,) = children_of(process, "asyncrl.trainer.ranks.rank_process")
    trainer.kill()
    release(run_dir)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert f"engine-1: process {engine.pid} was killed by SIGKILL" in stdout
    assert f"trainer-0: process {trainer.pid} was killed by SIGKILL" in stdout
    events = engine_events(run_dir)
    assert events[0] == ("engine lost", "engine-1")
    # A kill within a broadcast ends it for all engines, so both may restart.
    assert transport == "nccl" or len(events) == 2
    last = {name: what for what, name in events}
    assert {*last.values()} == {"engine up"}
    assert differences(whole, run_dir, of_metrics=False) == []
    assert staging_of(process.pid) == []


@pytest.mark.rotated
def test_stale_run_of_adapters_survives_kills_and_keeps_its_bound(
    tmp_path: Path,
) -> None:
    config = fuzz_config(
        tmp_path,
        task={"python": "rewards_for_test:BeginsWithALetter"},
        buffer={"max_staleness": 3, "look_ahead": 3, "filter": "equal_rewards"},
        rollout={"num_engines": 2, "max_tokens": 100},
        trainer={"num_steps": 16, "num_groups": 2, "lora": {"rank": 4, "alpha": 8}},
        journal={"keep": "checkpoint"},
    )
    run_dir = tmp_path / "run"
    assert Crashes(config, run_dir, seed=new_seed(), victims=["tree", "trainer"]).live()
    trained = [
        line for line in read_lines(run_dir / "trained.jsonl") if "version" in line
    ]
    groups = [
        {(entry["group_id"], entry["reward"]) for entry in line["trajectories"]}
        for line in trained
    ]
    assert all(
        len({group for group, _ in rewards}) < len(rewards) for rewards in groups
    ), "every batch teaches"
    steps = read_lines(run_dir / "metrics.jsonl")
    assert steps[-1]["rollout/filtered"] > 0, (
        "nothing was filtered: the test shows nothing"
    )
    assert sum(step["rollout/interrupted"] for step in steps) > 0, (
        "no push interrupted a rollout"
    )
    assert max(step.get("policy/logprob_gap_max", 0.0) for step in steps) <= 1e-4
    ages = {
        line["version"] - version
        for line in trained
        for entry in line["trajectories"]
        for _, _, version in entry["spans"]
    }
    assert 0 < max(ages) <= 3
    assert (run_dir / "final" / "model.safetensors").exists()


@pytest.mark.rotated
def test_adapters_of_two_ranks_are_pushed_in_chunks(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        placement=RESIDENT,
        trainer={
            "lora": {"rank": 4, "alpha": 8},
            "world_size": 2,
            "num_steps": 100_000,
        },
        supervision={"max_restarts": 0},
    )
    process = start(config, tmp_path / "run")
    wait_for_steps(tmp_path / "run", 3, process)
    children = children_of(process)
    (second,) = children_of(process, "trainer-1")
    second.kill()
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"trainer-1: process {second.pid} was killed by SIGKILL" in stderr
    assert "INFO asyncrl.trainer: serving" in stderr, "the end of its log"
    assert "Way out:" in stderr
    assert all_gone(children)
    assert staging_of(process.pid) == []
    steps = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert max(step["policy/logprob_gap_max"] for step in steps) <= 1e-4
