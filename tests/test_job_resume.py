"""Runs that were killed, damaged, copied or stopped, and go on: on-policy to the very same end, bit for
bit.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path

import psutil
import pytest
from crash_fuzz import differences, fuzz_config, never_killed, promise_of
from job_runs import RUN, all_gone, children_of, environment, read_lines, run, start, wait_for_steps
from resume_checker import effective, read_evidence, violations

from asyncrl.checkpoints.folder import Checkpoints
from asyncrl.config import load_config

pytestmark = pytest.mark.slow
NUM_STEPS = 30
KILLED_AT = 17


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzz_config(
        tmp_path_factory.mktemp("config"), trainer={"num_steps": NUM_STEPS}, checkpoint={"every": 5}
    )


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    """The run directory of a run that was never killed."""
    return never_killed(config, config.parent / "whole")


@pytest.fixture(scope="module")
def killed(config: Path) -> Path:
    """The run directory of one that was, with all its processes, and two checkpoints in it."""
    run_dir = config.parent / "killed"
    process = start(config, run_dir)
    wait_for_steps(run_dir, KILLED_AT, process)
    while (
        max(checkpoints(run_dir), default=0) < 15 or len(checkpoints(run_dir)) != 2
    ):  # the older ones are removed a moment later
        assert process.poll() is None, process.communicate()
    kill_tree(process)
    return run_dir


@pytest.fixture
def run_dir(killed: Path, tmp_path: Path) -> Path:
    """A copy of it elsewhere, to be damaged and gone on with."""
    return Path(shutil.copytree(killed, tmp_path / "copy" / "run"))


def kill_tree(process: subprocess.Popen[str]) -> None:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.communicate(timeout=20)
    assert all_gone(family)


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))


def resume(config: Path, run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return run(config, run_dir, *options, timeout_s=200)


def goes_on(config: Path, run_dir: Path, *options: str) -> str:
    """What a resume says that gets to the end."""
    answer = resume(config, run_dir, *options)
    assert answer.returncode == 0, (answer.stderr, answer.stdout)
    return answer.stdout


def refused(answer: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert answer.returncode == code, (answer.returncode, answer.stderr, answer.stdout)
    for word in (*words, "Way out:"):
        assert word in answer.stderr, (word, answer.stderr)
    assert "Traceback" not in answer.stderr


def assert_nothing_lost(config: Path, run_dir: Path) -> None:
    assert violations(read_evidence(run_dir), promise_of(config), num_steps=NUM_STEPS) == []


def test_a_run_directory_copied_elsewhere_goes_on_there_to_the_same_end(
    config: Path, whole: Path, run_dir: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "another machine"
    run_dir.rename(moved)
    said = goes_on(moved / "config.yaml", moved, "--resume", "must")
    assert f"goes on from policy_version {checkpoints_of(said)}" in said
    assert differences(whole, moved) == []
    assert_nothing_lost(config, moved)


def checkpoints_of(said: str) -> int:
    """The version that a resumed run says it goes on from; it is a checkpoint's."""
    (version,) = (
        int(line.rsplit(" ", 1)[1])
        for line in said.splitlines()
        if line.startswith("goes on from policy_version ")
    )
    assert version >= 15
    return version


def test_a_checkpoint_with_one_wrong_byte_is_named_and_the_one_before_is_taken(
    config: Path, whole: Path, run_dir: Path
) -> None:
    older, newest = checkpoints(run_dir)
    file = max(
        (run_dir / "checkpoints" / f"step_{newest}" / "trainer").iterdir(),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = goes_on(config, run_dir)
    assert f"step_{newest} is damaged: trainer/{file.name} has sha256" in said.replace("\n", " ")
    assert f"goes on from policy_version {older}" in said
    assert differences(whole, run_dir) == []
    assert_nothing_lost(config, run_dir)


def test_without_any_checkpoint_the_journal_is_enough(config: Path, whole: Path, run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    assert "goes on from policy_version 0" in goes_on(config, run_dir)
    assert differences(whole, run_dir) == []
    assert_nothing_lost(config, run_dir)


def test_a_damaged_journal_is_refused_and_moved_away_the_checkpoint_is_enough(
    config: Path, whole: Path, run_dir: Path
) -> None:
    file = run_dir / "journal.sqlite"
    with sqlite3.connect(
        file
    ) as database:  # what is in its log goes into the file, which is then damaged in the middle
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    content = bytearray(file.read_bytes())
    content[4096:8192] = bytes(4096)
    file.write_bytes(content)
    refused(
        resume(config, run_dir),
        1,
        "journal.sqlite is damaged",
        "move journal.sqlite* out of the run directory and resume",
    )

    for path in run_dir.glob("journal.sqlite*"):
        path.unlink()
    process = start(config, run_dir)
    newest = checkpoints(run_dir)[-1]
    while (
        len(read_evidence(run_dir).batches if file.exists() else ()) < 3
    ):  # and killed again, so that the new journal is needed
        assert process.poll() is None, process.communicate()
    kill_tree(process)
    goes_on(config, run_dir)
    assert weights_differ(whole, run_dir) == []
    lines = effective(read_lines(run_dir / "trained.jsonl"))
    assert lines.faults == []
    expected = effective(read_lines(whole / "trained.jsonl")).lines
    assert [prompts(lines.lines[version]) for version in range(NUM_STEPS)] == [
        prompts(expected[version]) for version in range(NUM_STEPS)
    ]
    assert min(read_evidence(run_dir).batches) == newest


def prompts(line: dict[str, object]) -> list[tuple[str, int, str]]:
    return [
        (entry["prompt_id"], entry["sample_index"], entry["tokens_sha"]) for entry in line["trajectories"]
    ]  # type: ignore[attr-defined]


def weights_differ(one: Path, other: Path) -> list[str]:
    return [difference for difference in differences(one, other) if difference.startswith("weights")]


def test_a_stopped_run_has_a_checkpoint_of_its_last_step_and_goes_on_to_the_same_end(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(config, run_dir)
    wait_for_steps(run_dir, 7, process)
    children = children_of(process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    assert all_gone(children)
    assert f"go on with: asyncrl run {run_dir / 'config.yaml'} --run-dir {run_dir}" in stdout.replace(
        "\n", ""
    ).replace("  ", " ")
    num_steps = len(read_lines(run_dir / "metrics.jsonl"))
    assert checkpoints(run_dir)[-1] == num_steps == len(read_evidence(run_dir).batches)
    assert f"goes on from policy_version {num_steps}" in goes_on(config, run_dir)
    assert differences(whole, run_dir) == []
    assert_nothing_lost(config, run_dir)


def test_a_directory_is_written_by_one_run_and_a_second_signal_loses_nothing(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(config, run_dir)
    wait_for_steps(run_dir, 3, process)
    second = run(config, run_dir)
    refused(second, 1, f"process {process.pid} writes into {run_dir}")
    children = children_of(process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (130, 143)  # whichever the kernel delivers last
    assert all_gone(children)
    goes_on(config, run_dir)
    assert differences(whole, run_dir) == []
    assert_nothing_lost(config, run_dir)


def test_what_cannot_or_must_not_be_gone_on_with_is_refused(
    config: Path, whole: Path, run_dir: Path, tmp_path: Path
) -> None:
    before = {
        path: path.read_bytes() for path in whole.glob("*.*") if path.is_file() and path.suffix != ".lock"
    }
    refused(resume(config, whole), 2, f"the run in {whole} is done")
    assert {path: path.read_bytes() for path in before} == before
    refused(resume(config, run_dir, "--resume", "never"), 2, f"{run_dir} holds a run already")
    refused(resume(config, tmp_path / "nothing", "--resume", "must"), 2, "nothing holds no run")
    assert not (tmp_path / "nothing").exists()
    changed = resume(
        config, run_dir, "trainer.learning_rate=0.001", "rollout.max_tokens=20", "observe.heartbeat_s=50"
    )
    refused(
        changed,
        2,
        "trainer.learning_rate: 0.003 -> 0.001",
        "rollout.max_tokens: 24 -> 20",
        "--allow-change trainer.learning_rate",
    )
    assert "observe.heartbeat_s" not in changed.stderr
    (run_dir / "final").mkdir()
    before = (run_dir / "metrics.jsonl").read_bytes()
    order = resume(config, run_dir, "seed=8", "--allow-change", "seed")
    refused(order, 1, "the saved position has seed=7, this run has 8")
    assert ((run_dir / "metrics.jsonl").read_bytes() == before, (run_dir / "final").is_dir()) == (True, True)
    settings = run_dir / "model" / "generation_config.json"
    settings.write_text(f"{settings.read_text()} ")
    refused(
        resume(config, run_dir), 2, "generation_config.json has other content", "--allow-change model.path"
    )
    refused(changed, 2, "trainer.learning_rate: 0.003 -> 0.001")
    assert "seed" not in resume(config, run_dir, "trainer.learning_rate=0.001").stderr, (
        "what was refused has changed nothing"
    )


def test_a_change_that_is_accepted_by_name_is_made(config: Path, whole: Path, run_dir: Path) -> None:
    goes_on(config, run_dir, "trainer.learning_rate=0.001", "--allow-change", "trainer.learning_rate")
    assert weights_differ(whole, run_dir) != []
    rates = {line["step"]: line["trainer/learning_rate"] for line in read_lines(run_dir / "metrics.jsonl")}
    assert (rates[0], rates[NUM_STEPS - 1]) == (0.003, 0.001)
    assert_nothing_lost_but_replays(config, run_dir)


def assert_nothing_lost_but_replays(config: Path, run_dir: Path) -> None:
    """Batches that are trained again at another learning rate have the same tokens, and another loss."""
    found = violations(read_evidence(run_dir), promise_of(config), num_steps=NUM_STEPS)
    assert [
        violation for violation in found if "another loss when it was trained again" not in violation
    ] == []


def test_a_trainer_that_is_killed_comes_back_and_the_run_ends_as_if_nothing_had_been(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(config, run_dir)
    wait_for_steps(run_dir, 8, process)
    (trainer,) = children_of(process, "asyncrl.trainer.rank_process")
    trainer.kill()
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert f"trainer-0: process {trainer.pid} was killed by SIGKILL" in stdout
    assert "starting the trainer again, 1 of 1000" in stdout
    assert differences(whole, run_dir) == []
    assert_nothing_lost(config, run_dir)


def test_a_full_disk_costs_checkpoints_each_with_a_warning_and_not_the_run(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size="$1" none "$2"'
    (probe := tmp_path / "probe").mkdir()
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, mount, "sh", "64k", str(probe)], capture_output=True).returncode
    ):
        pytest.skip("this system lets nobody mount a small disk of his own (unshare --user --mount)")
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    num_bytes = sum(path.stat().st_size for path in (whole / "checkpoints" / f"step_{NUM_STEPS}").rglob("*"))
    script = (
        f'{mount} && shift 2 && "$@"; code=$?; cp -r "{run_dir}/checkpoints" "{tmp_path}/kept/"; exit $code'
    )
    command = [*inside, script, "sh", str(int(num_bytes * 1.5)), str(run_dir / "checkpoints")]
    answer = subprocess.run(
        [*command, *RUN, str(config), "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
    )
    assert answer.returncode == 0, (answer.stderr, answer.stdout)
    warnings = json.loads((run_dir / "summary.json").read_text())["warnings"]
    assert len(warnings) == 6, warnings  # at steps 10, 15, 20, 25, 30, and once more at the end
    assert all("no checkpoint" in warning or "is left out" in warning for warning in warnings)
    assert any("No space left on device" in warning for warning in warnings)
    kept = tmp_path / "kept" / "checkpoints"
    found, told = Checkpoints(kept.parent, load_config(config).checkpoint).newest_whole()
    assert (found and found.version, told, [path.name for path in kept.iterdir()]) == (5, [], ["step_5"])
    assert differences(whole, run_dir) == []


def test_an_evaluation_is_neither_lost_nor_made_twice_across_a_kill(tmp_path: Path) -> None:
    task = {"python": "asyncrl.tasks.letters:Letters", "size": 20}
    config = fuzz_config(
        tmp_path,
        trainer={"num_steps": NUM_STEPS},
        checkpoint={"every": 5},
        eval={"task": task, "every": 10, "num_prompts": 8, "slots": 8},
    )
    run_dir = tmp_path / "run"
    process = start(config, run_dir)
    wait_for_steps(run_dir, KILLED_AT, process)
    kill_tree(process)
    before = [line["policy_version"] for line in read_lines(run_dir / "eval.jsonl")]
    goes_on(config, run_dir)
    versions = [line["policy_version"] for line in read_lines(run_dir / "eval.jsonl")]
    assert versions[: len(before)] == before
    assert versions == sorted(set(versions)), "each version once"
    assert versions[0] == 0
    assert versions[-1] == NUM_STEPS
    due = {version // 10 for version in versions}
    assert due == {0, 1, 2, 3} or read_lines(run_dir / "eval.jsonl")[-1]["eval/skipped"] > 0
    assert_nothing_lost(config, run_dir)


def test_a_slow_disk_makes_a_run_slower_and_changes_nothing_else(
    config: Path, whole: Path, tmp_path: Path
) -> None:
    slow = {"PYTHONPATH": f"{Path(__file__).parent / 'slow_disk'}:{Path(__file__).parent}"}
    command = [*RUN, str(config), "--run-dir", str(tmp_path / "slow")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment(**slow))
    assert answer.returncode == 0, answer.stderr
    steps = read_lines(tmp_path / "slow" / "metrics.jsonl")
    assert steps[-1]["time_s"] > 0.2 * len(steps), (
        "every batch waited for a commit that took so long at least"
    )
    assert differences(whole, tmp_path / "slow") == []
    assert_nothing_lost(config, tmp_path / "slow")
