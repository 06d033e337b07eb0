"""Real `asyncrl serve` processes: agents tried by hand and from the config, and
recorded.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from job_runs import children_of, popen, read_lines, run, write_config
from process_ends import all_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SERVE = [sys.executable, "-m", "asyncrl.cli", "serve"]
AGENT: dict[str, Any] = {
    "generator": {"python": "agents_for_test:share_of_a"},
    "rollout": {"max_prompt_tokens": 64, "group_size": 3},
}


Serve = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start `asyncrl serve`; processes of failed tests are killed."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments: str | Path) -> subprocess.Popen[str]:
            process = stack.enter_context(popen(*arguments, command=SERVE))
            stack.callback(process.kill)
            return process

        yield begin


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Return the output up to the line with `text`; the test's timeout limits the wait."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if text in line:
            return lines
    raise AssertionError(f"{lines} {process.communicate()[1]}")


def rest_of(process: subprocess.Popen[str]) -> list[str]:
    """Return the rest of the output; `communicate` would omit buffered lines."""
    assert process.stdout is not None
    assert process.stderr is not None
    said, stderr = process.stdout.read().splitlines(), process.stderr.read()
    assert process.wait(240) == 0, stderr
    return said


def shell(line: str, exports: str) -> Any:
    """Run the line in a shell after the exports; return its JSON output."""
    answer = subprocess.run(
        ["bash", "-c", f"{exports}\n{line}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return json.loads(answer.stdout)


def test_agent_tried_by_hand_is_recorded(tmp_path: Path, serve: Serve) -> None:
    config = write_config(
        tmp_path, rollout={"max_prompt_tokens": 100}, gateway={"max_calls": 2}
    )
    file = tmp_path / "rollouts.jsonl"
    process = serve(
        "gateway", config, "--record", file, "--run-dir", tmp_path / "served"
    )
    said = lines_until(process, "Ctrl-C to stop")
    children = children_of(process)
    exports = "\n".join(line for line in said if "_KEY=" in line or "_URL=" in line)
    chat, outcome = (line.strip() for line in said if "curl" in line)

    (url, *_), (key, *_) = (
        re.findall(rf"{name}=(\S+)", exports) for name in ("URL", "KEY")
    )
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "b 2"}]
        for _ in range(3):  # one more than gateway.max_calls
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "a 1"}]
        assert answer.id == "chatcmpl-2"
        assert shell(outcome.replace("1.0", "0.5"), exports) == {}
        assert shell(chat, exports)["id"] == "chatcmpl-0", (
            "the key continues, in its own session"
        )
        assert shell(outcome, exports) == {}
        assert "not one sampled token" in shell(outcome, exports)["error"]["message"]
        assert shell(chat, exports)["id"] == "chatcmpl-0"

    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=240)
    assert (process.returncode, stderr) == (0, "")
    assert all_gone(children)
    assert "rollout 0: reward 0.5, 3 turns" in stdout
    records = read_lines(file)
    assert [record["reward"] for record in records] == [0.5, 1.0, None]
    assert records[1]["branches"] != records[2]["branches"], "drawn anew"
    log = (tmp_path / "served" / "logs" / "controller.log").read_text()
    assert not [key for key in re.findall(r"KEY=(\S+)", exports) if key in log], (
        "keys are never logged"
    )


def test_agent_of_the_config_is_recorded(tmp_path: Path, serve: Serve) -> None:
    config, file = write_config(tmp_path, **AGENT), tmp_path / "rollouts.jsonl"
    process = serve(
        "gateway",
        config,
        "--rollouts",
        "4",
        "--record",
        file,
        "--run-dir",
        tmp_path / "served",
    )
    said = rest_of(process)
    last = next(place for place, line in enumerate(said) if "[4/4]" in line)
    assert re.search(
        r"\[4/4\] 0/\d+ sample \d: reward \S+, 2 turns, \d+ sampled tokens", said[last]
    )
    assert "<|assistant|>" in said[last + 1], (
        "what the model said, from its first token to its last"
    )
    records = read_lines(file)
    mean = np.mean([record["reward"] for record in records])
    assert f"mean reward {mean:.4f} over 4 of 4 rollouts" in said
    assert {len(record["branches"]) for record in records} == {1}


def test_killed_gateway_leaves_no_process(tmp_path: Path, serve: Serve) -> None:
    process = serve("gateway", write_config(tmp_path), "--run-dir", tmp_path / "served")
    lines_until(process, "Ctrl-C to stop")
    children = children_of(process)
    process.kill()
    process.communicate(timeout=240)
    assert all_gone(children)

    process = serve(
        "engine", tmp_path / "config-for-test.yaml", "--run-dir", tmp_path / "engine"
    )
    said = lines_until(process, "curl")
    exports = next(line for line in said if "export" in line)
    (key,) = re.findall(r"KEY=(\S+)", exports)
    assert key not in (tmp_path / "engine" / "logs" / "controller.log").read_text()
    (health,) = (shell(line, exports) for line in said if "curl" in line)
    assert health["policy_version"] == 0
    (engine,) = children_of(process)
    engine.kill()
    _, stderr = process.communicate(timeout=240)
    assert (process.returncode, stderr.split(" process")[0]) == (
        1,
        "ComponentError: engine-0:",
    ), stderr
    assert "was killed by SIGKILL" in stderr


def test_agent_evaluation_samples_one_version(tmp_path: Path) -> None:
    letters = {"python": "asyncrl.tasks.toy:Letters", "size": 6}
    evaluation = {
        "task": letters,
        "every": 2,
        "num_prompts": 6,
        "slots": 4,
        "engine": "rollout",
    }
    config = write_config(tmp_path, **AGENT, eval=evaluation, trainer={"num_steps": 4})
    answer = run(config, tmp_path / "run")
    assert answer.returncode == 0, answer.stderr
    assert "WARNING" not in answer.stdout, (
        "a token of another version would end the evaluation"
    )
    lines = read_lines(tmp_path / "run" / "eval.jsonl")
    assert [(line["policy_version"], line["eval/failed"]) for line in lines] == [
        (0, 0),
        (2, 0),
        (4, 0),
    ]
    assert all(2 <= line["eval/length_mean"] <= 48 for line in lines)
