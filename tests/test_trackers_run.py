"""One real run, with trackers that raise and note, and with its status port open."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import pytest
from job_runs import ended, read_lines, start, wait_until, write_config
from prometheus_client.openmetrics.parser import text_string_to_metric_families


@pytest.mark.slow
def test_a_run_goes_its_way_whatever_its_trackers_do_and_says_how_it_stands_at_its_port(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    own = {f"trackers_for_test:{name}": {"path": str(tmp_path / name)} for name in ("Noting", "Raising")}
    trackers = ["tensorboard", *own]
    config = write_config(
        tmp_path,
        trainer={"num_steps": 100_000},
        observe={
            "console": "plain",
            "trackers": trackers,
            "tracker_args": own,
            "status_port": 0,
        },
    )
    process = start(config, run_dir)
    wait_until(lambda: len(read_lines(run_dir / "metrics.jsonl")) >= 2, process)
    wait_until(lambda: json.loads((run_dir / "status.json").read_text())["step"] >= 2, process)
    url, key = (
        json.loads((run_dir / "status.json").read_text())["status_url"],
        (run_dir / "status.key").read_text(),
    )
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    assert families["asyncrl_tokens_generated"].samples[0].value > 0
    assert families["asyncrl_engine_decode_seconds"].type == "counter"
    assert {"asyncrl_reward_mean", "asyncrl_buffer_running", "asyncrl_perf_step_seconds"} <= families.keys()
    process.send_signal(signal.SIGINT)
    run = ended(process)
    assert run.returncode == 130, run.stderr
    assert f"{url}/metrics and /status; the key: {run_dir / 'status.key'}" in run.stdout
    assert "tracker trackers_for_test:Raising is turned off, the run continues" in run.stdout
    told = read_lines(tmp_path / "Noting")
    num_steps = len(read_lines(run_dir / "metrics.jsonl"))
    assert [call[1] for call in told if call[0] == "step"] == [*range(1, num_steps + 1)]  # type: ignore[index]
    assert told[-1] == ["close", "interrupted"]
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], "status_url" in status) == ("interrupted", False)
