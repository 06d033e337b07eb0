"""What ends a run ends it in seconds, with the room's name, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from job_runs import (
    all_gone,
    children_of,
    interrupt,
    read_lines,
    run,
    staging_of,
    start,
    wait_for_steps,
    write_config,
)

pytestmark = pytest.mark.slow
LONG = "trainer.num_steps=100000"


def assert_failed(answer: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert answer.returncode == code, (answer.returncode, answer.stderr, answer.stdout)
    for word in words:
        assert word in answer.stderr, (word, answer.stderr)
    assert "Way out:" in answer.stderr
    assert "Traceback" not in answer.stderr.replace("the traceback", "")


def test_a_run_whose_output_nobody_reads_goes_to_its_end(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    process = start(config, tmp_path / "run", "trainer.num_steps=60")
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # type: ignore[arg-type]
    assert process.wait(timeout=200) == 0
    stdout, _ = process.communicate()
    assert len(stdout) <= 4096
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 60
    assert "standard output is not read" in (tmp_path / "run" / "logs" / "controller.log").read_text()


@pytest.mark.parametrize(
    ("victim", "name"),
    [("asyncrl_servers.embedded", "engine-0"), ("asyncrl.trainer.rank_process", "trainer-0")],
)
def test_a_killed_process_ends_the_run_and_is_named(tmp_path: Path, victim: str, name: str) -> None:
    config = write_config(tmp_path, buffer={"max_staleness": 2}, supervision={"max_restarts": 0})
    process = start(config, tmp_path / "run", LONG)
    wait_for_steps(tmp_path / "run", 2, process)
    children = children_of(process)
    (child,) = children_of(process, victim)
    child.kill()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    assert f"{name}: process {child.pid} was killed by SIGKILL" in stderr
    assert "Way out:" in stderr
    assert all_gone(children)
    assert staging_of(process.pid) == []


def test_a_frozen_engine_ends_the_run_within_the_heartbeat(tmp_path: Path) -> None:
    config = write_config(tmp_path, observe={"heartbeat_s": 12}, supervision={"max_restarts": 0})
    process = start(config, tmp_path / "run", LONG)
    wait_for_steps(tmp_path / "run", 2, process)
    (engine,) = children_of(process, "asyncrl_servers.embedded")
    children = children_of(process)
    engine.suspend()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "engine-0" in stderr
    assert "heartbeat_s=12" in stderr
    assert all_gone(children)


def test_a_run_goes_on_to_its_end_when_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    process = start(write_config(tmp_path), tmp_path / "run")
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(timeout=60) == 0, stderr
    assert stderr == ""
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["state"] == "done"
    assert "nothing is shown from here on" in (tmp_path / "run" / "logs" / "controller.log").read_text()
    process.stderr.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_makes_a_checkpoint_says_how_to_go_on_and_leaves_nothing_running(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start(write_config(tmp_path, buffer={"max_staleness": 2}), tmp_path / "run", LONG)
    wait_for_steps(tmp_path / "run", 2, process)
    children = children_of(process)
    stdout, stderr = interrupt(process, number)
    assert process.returncode == code, stderr
    assert "interrupted" in stdout
    assert f"--run-dir {tmp_path / 'run'}" in " ".join(stdout.split()).replace("\n", "")
    steps = len(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert (tmp_path / "run" / "checkpoints" / f"step_{steps}" / "manifest.json").is_file()
    assert all_gone(children)
    assert staging_of(process.pid) == []


def test_a_second_signal_ends_the_run_at_once_and_leaves_nothing_either(tmp_path: Path) -> None:
    process = start(write_config(tmp_path, buffer={"max_staleness": 2}), tmp_path / "run", LONG)
    wait_for_steps(tmp_path / "run", 2, process)
    children = children_of(process)
    process.send_signal(signal.SIGINT)
    interrupt(process, signal.SIGTERM)
    assert process.returncode in (130, 143)  # whichever the kernel delivers last
    assert all_gone(children)
    assert staging_of(process.pid) == []


def test_an_interrupt_during_start_up_leaves_nothing_running(tmp_path: Path) -> None:
    process = start(write_config(tmp_path), tmp_path / "run", LONG)
    while not (tmp_path / "run" / "logs" / "engine-0.log").exists():
        assert process.poll() is None
    children = children_of(process)
    interrupt(process)
    assert process.returncode == 130
    assert all_gone(children)


def test_kill_9_of_the_controller_takes_its_children_with_it(tmp_path: Path) -> None:
    process = start(write_config(tmp_path, buffer={"max_staleness": 2}), tmp_path / "run", LONG)
    wait_for_steps(tmp_path / "run", 2, process)
    children = children_of(process)
    process.kill()
    process.communicate(timeout=20)
    assert all_gone(children)
    assert staging_of(process.pid) == []


def test_a_reward_that_always_raises_ends_the_run_and_is_quoted(tmp_path: Path) -> None:
    answer = run(
        write_config(tmp_path, task={"python": "rewards_for_test:Raises"}),
        tmp_path / "run",
        "rollout.max_failed_groups=3",
    )
    assert_failed(answer, 1, "KeyError", "no such answer", "max_failed_groups=3")


def test_a_reward_that_raises_now_and_then_costs_rollouts_and_not_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path, task={"python": "rewards_for_test:RaisesSometimes"})
    answer = run(config, tmp_path / "run", "trainer.num_steps=5")
    assert answer.returncode == 0, answer.stderr
    last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["rollout/retried"] > 0
    assert len(read_lines(tmp_path / "run" / "trained.jsonl")) == 5


@pytest.mark.parametrize("pool", ["thread", "process"])
def test_a_reward_that_hangs_ends_the_run_and_never_hangs_it(tmp_path: Path, pool: str) -> None:
    config = write_config(
        tmp_path, task={"python": "rewards_for_test:Hangs", "reward_timeout_s": 0.5, "reward_pool": pool}
    )
    answer = run(
        config, tmp_path / "run", "rollout.max_failed_groups=2", "rollout.retries=0", "rollout.group_size=2"
    )
    assert_failed(answer, 1, "reward")


def test_a_reward_that_is_no_number_is_a_failure_and_not_a_zero(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a 1", "answer": "a"}\n')
    config = write_config(
        tmp_path, task={"python": None, "files": [str(data)], "reward": "rewards_for_test:no_number"}
    )
    answer = run(config, tmp_path / "run", "rollout.max_failed_groups=2")
    assert_failed(answer, 1, "number")
    assert read_lines(tmp_path / "run" / "metrics.jsonl") == []


def test_an_empty_data_file_is_named(tmp_path: Path) -> None:
    data = tmp_path / "empty.jsonl"
    data.write_text("")
    config = write_config(tmp_path, task={"python": None, "files": [str(data)], "reward": "math"})
    assert_failed(run(config, tmp_path / "run"), 2, "empty.jsonl")


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path, model={"scratch": None, "path": str(tmp_path / "nowhere")})
    assert_failed(run(config, tmp_path / "run"), 2, "nowhere", "no such folder")


def test_a_model_folder_with_broken_weights_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_model_dir.iterdir():
        (broken / file.name).write_bytes(
            file.read_bytes() if file.suffix != ".safetensors" else b"not weights"
        )
    config = write_config(tmp_path, model={"scratch": None, "path": str(broken)})
    assert_failed(run(config, tmp_path / "run"), 1, "broken")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        answer = run(write_config(tmp_path), tmp_path / "run", f"rollout.ports=[{port}]")
    assert_failed(answer, 2, f"port {port} for engine-0")


def test_a_config_that_no_run_has_written_is_not_written_over(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("precious")
    assert_failed(run(write_config(tmp_path), run_dir), 2, "holds a config.yaml that no run has written")
    assert (run_dir / "config.yaml").read_text() == "precious"


def test_a_user_loss_that_gives_nan_ends_the_run_with_the_batch_saved(tmp_path: Path) -> None:
    answer = run(write_config(tmp_path, algorithm={"loss": "losses_for_test:nan_loss"}), tmp_path / "run")
    assert_failed(answer, 1, "trainer", "nan")
    assert list((tmp_path / "run" / "failed_batches").glob("*.safetensors"))


def test_an_unknown_loss_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    answer = run(write_config(tmp_path, algorithm={"loss": "ppo_clipp"}), tmp_path / "run")
    assert_failed(answer, 2, "algorithm.loss=ppo_clipp", "ppo_clip")


def test_a_full_disk_is_told_without_a_traceback_and_with_the_way_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "trained.jsonl").symlink_to("/dev/full")  # the trainer's record, in the middle of the run
    (run_dir / ".summary.json.new").symlink_to("/dev/full")  # and what is written when that has failed
    assert_failed(
        run(write_config(tmp_path), run_dir),
        1,
        "trainer",
        "No space left on device",
        "free space on the disk",
    )


def test_a_disk_that_is_full_at_the_very_end_is_told_too(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / ".summary.json.new").symlink_to("/dev/full")
    answer = run(write_config(tmp_path), run_dir, "trainer.num_steps=2")
    assert_failed(answer, 1, "controller", "No space left on device", "free space on its disk")
    assert (run_dir / "final" / "config.json").is_file()
