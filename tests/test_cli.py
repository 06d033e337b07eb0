"""The command line as a person meets it: real processes, real exit codes, and no torch."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from command_lines import run_lines

from asyncrl.base.errors import OF_TRAIN
from asyncrl.cli import app
from asyncrl.config import load_any

ROOT = Path(__file__).parent.parent
LINES = """
--help -> 0: scale ... serve
--version -> 0: asyncrl 0.
work --help -> 0: ASYNCRL_WORKER_KEY
keys -> 0: settings; more: asyncrl keys SECTION, asyncrl keys --all
keys --all -> 0: supervision.max_restarts (integer
keys bufer -> 2: did you mean buffer?
keys buffer.max_staleness -> 0: buffer.max_staleness (integer, default 1)
keys straggler -> 0: buffer.on_overdue (wait | mask | drop
keys buffer.max_stalenes -> 2: did you mean buffer.max_staleness?
keys --schema -> 0: "max_staleness": {
-h -> 0: scale ... --install-completion
run -h -> 0: --resume
check configs/quickstart.yaml model.dtype=auto -> 0: dtype: auto is ... engine-0 ... mode: ... cpu: needs
run configs/quickstart.yaml buffer.max_stalenes=4 -> 2: did you mean buffer.max_staleness? ... Way out:
check configs/quickstart.yaml --slots 3 -> 2: No such option: --slots
run configs/quickstart.yaml --trainer.num_steps=3 -> 2: write trainer.num_steps=3
run configs/quickstart.yaml --batch_size 3 -> 2: write trainer.num_groups=3
run configs/quickstart.yaml --resume -> 2: --resume takes auto, never or must
check configs/quickstart.yaml --devices 3 --cores x -> 2: Invalid value for '--cores'
check configs/quickstart.yaml learning_rate=1 -> 2: did you mean ... trainer.learning_rate
check configs/quickstart.yaml temperature=1 -> 2: did you mean ... rollout.temperature
run configs/quickstart.yaml --run-dir "" -> 2: an argument is empty ... shell variable
train configs/quickstart.yaml -> 2: write `asyncrl run ...`
-V -> 0: asyncrl 0.
version -> 0: asyncrl 0.
-v -> 2: -V prints the version
status docs -v -> 2: --verbose
resume runs/x -> 2: write `asyncrl run runs/x/config.yaml --run-dir runs/x`
run -> 2: `asyncrl init quickstart`
sweep c.yaml -> 2: trainer.learning_rate=1e-5,3e-5
stop -> 2: `asyncrl runs`
launch c.yaml -> 2: name a YAML file
help run -> 2: `asyncrl run --help`
configs/quickstart.yaml run -> 2: `asyncrl run configs/quickstart.yaml`
serve configs/quickstart.yaml -> 2: `asyncrl serve gateway configs/quickstart.yaml`
run trainer.num_steps=3 c.yaml -> 2: write the config before its settings
run configs/quickstart.yaml other.yaml -> 2: name one config
run configs/quickstart.yaml --run-dir=~/r -> 2: write "--run-dir=$HOME/r"
run configs/quickstart.yaml --set seed=3 -> 2: without --set
run tests -> 2: model.path=tests
run configs/quickstart.yaml -q -> 2: observe.console=none
runs configs -> 0: no runs in configs; `asyncrl status configs`
check pyproject.toml -> 2: give the path of a YAML file
init quickstart --folder pyproject.toml -> 2: cannot use ... File exists ... Way out:
tail runs/x -> 2: write `asyncrl watch ...`
compare a b -> 2: write `asyncrl report ...`
rm runs/x -> 2: write `asyncrl delete ...`
kill runs/x -> 2: write `asyncrl stop ...`
run configs/quickstart.yaml --dry-run -> 2: `asyncrl check CONFIG`
run --config configs/quickstart.yaml -> 2: write the config without --config
run configs/quickstart.yaml runs/mine -> 2: --run-dir runs/mine
keys learningrate -> 2: did you mean trainer.learning_rate
keys max-token -> 2: did you mean ... rollout.max_tokens
keys zzzqqq -> 2: no setting, section or meaning has zzzqqq.
stop docs -> 2: is not a run directory ... Way out:
delete docs --yes -> 2: is not a run directory ... Way out:
check configs/quickstart.yaml seed=1 trainer.num_steps = 3 -> 2: write trainer.num_steps=3, without spaces
check configs/quickstart.yaml trainer.num_steps= 3 -> 2: write trainer.num_steps=3, without spaces
check configs/quickstart.yaml trainer.num_steps: 3 -> 2: write trainer.num_steps=3, without spaces
check configs/quickstart.yaml algorithm.loss=grpo -> 2: write algorithm={loss: ppo_clip, advantage: grpo,
check configs/quickstart.yaml algorithm.loss=rloo -> 2: write algorithm.advantage=rloo
status docs -> 2: Way out:
inspect docs -> 2: Way out:
report docs -> 2: is not a run directory ... Way out:
scale docs engines=2 -> 2: is not a run directory ... Way out:
export docs out -> 2: is not a run directory ... Way out:
export docs out more -> 2: takes RUN_DIR and OUT
keys buffer --count -> 2: --count is of --all
runs docs/none -> 2: there is no folder docs/none ... Way out:
init quickstrat --folder build -> 2: name one of quickstart, gsm8k, agent
""".strip().splitlines()


def test_commands_work_without_torch() -> None:
    cases = [re.split(r" -> |(?<=\d): ", line) for line in LINES]
    lines = [arguments for arguments, _, _ in cases]
    *answers, counted = run_lines(ROOT, *lines, "keys --all --count")
    for (arguments, code, says), (returned, out, err) in zip(
        cases, answers, strict=True
    ):
        said = err if returned else out
        assert returned == int(code), (arguments, said)
        assert all(words in said for words in says.split(" ... ")), (arguments, said)
        assert "Traceback" not in err
    # A key of a task's generator is a key of generator.
    _, listed, _ = answers[lines.index("keys --all")]
    names = re.findall(r"^(\S+) \(", listed, re.MULTILINE)
    repeated = [name for name in names if name.startswith("task.generator.")]
    assert {name.removeprefix("task.") for name in repeated} <= {*names}
    assert int(counted[1]) == len(names) - len(repeated)


def commands_below(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for word, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands_below(one, f"{name} {word}")
        else:
            yield f"{name} {word}", one


COMMANDS = [*commands_below(typer.main.get_command(app), "asyncrl")]
ARGUMENTS = {
    "init": "quickstart --folder new",
    "keys": "buffer",
    "scale": "run engines=2",
    "work": "http://127.0.0.1:1 --python os:getcwd",
    "export": "run out",
    "watch": "run",
}
"""Arguments of commands that do not begin with CONFIG or RUN_DIR."""
NEEDS_TRAIN = {"run", "sft", "check", "serve gateway", "serve engine"}


def test_a_command_without_the_train_extra_has_no_traceback(tmp_path: Path) -> None:
    for kind in ("quickstart", "sft"):
        written = (ROOT / f"configs/{kind}.yaml").read_text(encoding="utf-8")
        (tmp_path / f"{kind}.yaml").write_text(written, encoding="utf-8")
    (tmp_path / "invalid.yaml").write_text("model: qwen\n", encoding="utf-8")
    (tmp_path / "run").mkdir()
    cases = []
    for path, _ in COMMANDS:
        name = path.removeprefix("asyncrl ")
        valid = "sft.yaml" if name == "sft" else "quickstart.yaml"
        cases += [(name, ARGUMENTS.get(name, each)) for each in (valid, "invalid.yaml")]
    lines = (" ".join(case) for case in cases)
    answers = run_lines(tmp_path, *lines, without=OF_TRAIN)
    for (name, arguments), (code, out, err) in zip(cases, answers, strict=True):
        said = out + err
        assert "Traceback" not in said
        assert code in (0, 1, 2), (name, said)
        assert not code or re.search(r"Error: .*|No such command|Usage: ", said), said
        if name in NEEDS_TRAIN:
            is_valid = arguments != "invalid.yaml"
            assert ("pip install 'asyncrl[train]'" if is_valid else "model") in said


@pytest.mark.extension("ray", "vllm")
@pytest.mark.parametrize(("name", "command"), COMMANDS)
def test_help_ends_with_examples_that_parse(name: str, command: Any) -> None:
    for _ in range(2):
        shown = command.get_help(command.make_context(name, [], resilient_parsing=True))
    _, examples = shown.split("  For example:\n")
    assert 1 <= len(examples.splitlines()) <= 3
    for line in examples.splitlines():
        assert line.startswith(f"    {name}")
        words = shlex.split(line)[len(name.split()) :]
        given = command.make_context(name, words).params
        path = given.get("config", given.get("target"))
        if path is None or path.parts[0] == "runs":
            continue
        changes = given.get("overrides") or []
        for choice in given.get("choices") or []:
            changes.append(choice.partition(",")[0])
        load_any(ROOT / path, changes)


@pytest.mark.extension("sft")
def test_install_page_lists_the_commands_without_an_extra() -> None:
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    row, of_train = (
        re.search(rf"^\| {extra} \| (.*)$", page, re.MULTILINE)
        for extra in ("none, or `worker`", "`train`")
    )
    assert row is not None
    assert of_train is not None
    listed = set(re.findall(r"`(\w+)`", row[1].partition(";")[0]))
    assert listed.isdisjoint(rest := set(re.findall(r"`(\w+)`", of_train[1])))
    assert listed | rest == {*typer.main.get_command(app).commands}  # type: ignore[attr-defined]
    assert rest == {"check", "run", "sft", "eval", "sweep", "export", "serve"}


WRITTEN = {
    "quickstart": ["quickstart.yaml"],
    "gsm8k": ["gsm8k-qwen3-0.6b-1gpu.yaml"],
    "agent": ["agent.yaml", "lookup.py"],
}


def test_init_writes_configs_that_pass_the_check(tmp_path: Path) -> None:
    configs = [files[0] for files in WRITTEN.values()]
    inits = [f"init {kind}" for kind in WRITTEN]
    described = {"gsm8k": "--devices 1xRTX4090-24GB --cores 16 --memory 64GB"}
    checks = [
        f"check {files[0]} {described.get(kind, '')}" for kind, files in WRITTEN.items()
    ]
    answers = run_lines(tmp_path, *inits, *checks, *inits)
    first, checked, again = answers[:3], answers[3:6], answers[6:]
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {name for files in WRITTEN.values() for name in files}
    for files, (code, said, _) in zip(WRITTEN.values(), first, strict=True):
        assert code == 0, said
        assert all(f"wrote {name}\n" in said for name in files)
    for name, (_, said, _), (code, _, error) in zip(
        configs, first, checked, strict=True
    ):
        assert re.search(rf"^  asyncrl run {name}", said, re.MULTILINE)
        assert code == 0, error
    for code, _, error in again:
        assert code == 2
        assert "init overwrites no file" in error


def made_run(folder: Path, name: str, *, written_s: int, rewards: list[float]) -> Path:
    """A run directory as far as a list of runs reads it."""
    run_dir = folder / "runs" / name
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text((ROOT / "configs/quickstart.yaml").read_text())
    status = {
        "state": "done",
        "step": len(rewards),
        "num_steps": 360,
        "why": "",
        "updated_s": written_s,
    }
    (run_dir / "status.json").write_text(json.dumps(status))
    lines = (
        json.dumps({"step": step, "reward/mean": reward})
        for step, reward in enumerate(rewards, 1)
    )
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    os.utime(run_dir / "status.json", (written_s, written_s))
    return run_dir


def test_runs_lists_newest_first_with_state_steps_and_reward(tmp_path: Path) -> None:
    run_dir = made_run(
        tmp_path, "second", written_s=2000, rewards=[0.0] * 5 + [0.5] * 10
    )
    with (run_dir / "eval.jsonl").open("w") as file:
        for reward in (0.25, 0.75, 0.5):
            line = {"name": "a", "policy_version": 0, "eval/reward_mean": reward}
            file.write(json.dumps(line) + "\n")
    made_run(tmp_path, "first", written_s=1000, rewards=[])
    (tmp_path / "runs" / "no-run").mkdir()
    (_, text, _), (_, as_json, _) = run_lines(tmp_path, "runs", "runs runs --json")
    assert [row.split()[:4] for row in text.splitlines()[1:]] == [
        ["runs/second", "done", "15/360", "0.500"],
        ["runs/first", "done", "0/360", "-"],
    ]
    (second, _) = json.loads(as_json)
    assert (second["run_dir"], second["reward"]) == ("runs/second", 0.5)
    assert (second["best_eval"], second["pid"]) == (0.75, None)
    size = sum(
        file.stat().st_blocks * 512 for file in (tmp_path / "runs/second").iterdir()
    )
    assert 0 < second["size_bytes"] == size


NOISY = """
def score(prompt, completion, answer):
    print("noise of user code")
    return 1.0
"""


def test_json_is_all_that_stdout_has(tmp_path: Path) -> None:
    made_run(tmp_path, "mine", written_s=1000, rewards=[0.0] * 5)
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
    config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    config["task"] = {"files": ["rows.jsonl"], "reward": "noisy:score"}
    config["eval"] = None
    (tmp_path / "noisy.yaml").write_text(yaml.safe_dump(config))
    lines = ("status runs/mine --json", "check noisy.yaml --json")
    (_, status, _), (code, checked, noise) = run_lines(tmp_path, *lines)
    assert json.loads(status).items() >= {"state": "done", "step": 5}.items()
    assert code == 0, noise
    assert any("engine-0" in line for line in json.loads(checked)["lines"])
    assert "engine-0" in noise, "a person still reads the lines"


def test_command_without_a_run_takes_and_names_the_newest(tmp_path: Path) -> None:
    commands = ("status", "inspect", "report", "export out")
    for code, _, error in run_lines(tmp_path, *commands):
        assert (code, "there is no folder runs" in error) == (2, True)
    made_run(tmp_path, "old", written_s=1000, rewards=[0.1])
    made_run(tmp_path, "new", written_s=2000, rewards=[0.1])
    for _, _, error in run_lines(tmp_path, *commands):
        assert "the newest run: runs/new\n" in error
