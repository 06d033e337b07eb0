"""Ways out that the product prints: they name settings, commands and files that exist,
and a reader who follows the way out of a refused config gets a config that is taken.
"""

from __future__ import annotations

import re
import shlex
import sys
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from followed_ways import Typed, all_refusals, dead_ends, name_of, parts_of, split
from job_runs import CONFIG
from launch_cases import single_node
from needed_extensions import NAMED, skip_without
from printed_texts import COMMAND, ROOT, faults_of, parse, texts_of

from asyncrl.algorithms.registry import resolve
from asyncrl.base.errors import ConfigError
from asyncrl.cli import main
from asyncrl.config import RunConfig
from asyncrl.config.load import job_forms, load_any, load_job
from asyncrl.job.roles import extra_servers
from asyncrl.launch.machine import Machine, described_nodes
from asyncrl.launch.placement import place
from asyncrl.templates import write_template

RUN: dict[str, Any] = {
    "model": {"path": "some/model"},
    "task": {"files": ["data.jsonl"], "reward": "my:reward"},
}
SFT: dict[str, Any] = {"model": {"path": "some/model"}, "data": {"files": ["a.jsonl"]}}
TINKER: dict[str, Any] = {"model": {"path": "some/model"}, "tinker": {}}
WORDS = {
    "HERE": "rollout.engine=vllm rollout.urls=['http://127.0.0.1:8000']",
    "TAUGHT": "teacher.path=a/b algorithm.distill_weight=1",
    "VERIFIED": "OWN generator.verifiers=wordle",
    "OWN": "task.verifiers=true task.files=none task.reward=none",
    "TWO": "task=[{python: 'a:B'}, {python: 'a:C', name: c}]",
    "MIX": "task=[{python: 'a:B', generator: {python: 'x:run'}}, {python: 'a:C', name: c}]",
    "EVALS": "eval=[{name: often, every: 5, task: {python: 'a:B'}}, {name: seldom, every: 20, task: "
    "{python: 'a:B'}}]",
    "SCRATCH": "model.path=none model.scratch.characters=ab model.scratch.architecture={}",
    "JUDGED": "task.reward={judge: {model: a/b, prompt: '{completion}'}}",
    "SCORED": "task.reward={model: {path: a/b}}",
    "COLOCATED": "placement.rollout=trainer buffer.max_staleness=0",
}
REFUSED = (ROOT / "tests/refused_configs.txt").read_text(encoding="utf-8").splitlines()
"""MISTAKE -> words of the refusal => WAY | WAY. A mistake may begin with SFT or TINKER, or
with the devices of a machine. Ways are written here where the text gives a rule, not a value; `-a.b`
removes a setting. All other ways are read from the printed text.
"""
TAKEN = (
    "generator.python=a:run algorithm.advantage=rloo algorithm.turn_discount=1",
    "TAUGHT algorithm.reward_weight=0 rollout.group_size=1",
    "JUDGED task.reward.judge.engine=vllm rollout.vllm_python=/opt/vllm/bin/python",
    "TAUGHT teacher.engine=vllm rollout.vllm_python=/opt/vllm/bin/python",
    "TAUGHT task.name=sums teacher.tasks=[sums]",
    "rollout.top_p=0.9 rollout.top_k=1000000 rollout.min_p=1",
    "rollout.engine=vllm rollout.top_k=50",
    "TWO task.0.share=0.7 task.c.share=0.3 task.c.size=7",
    "EVALS checkpoint.keep_best=true checkpoint.every=5",
    "rollout.engine=vllm rollout.urls=['http://h:1'] weight_sync.disk_dir=/data",
)
NOT_PROVOKED = {
    "{} was written by asyncrl {}, and this is {}: {}": "test_older_runs.py",
    "cannot read the config {}: {}": "a file without settings; test_config.py",
    "the extension {} cannot be used: {}": "test_extensions.py",
    "no installed extension has a reward that is a section; name a function, as "
    "module:name": "test_extensions.py",
    "it is not key=value": "the end of the refusal of an override",
    "there are several; say which one, and its key: {}": "the end of such a refusal",
    "no setting, section or meaning has {}{}": "of asyncrl keys; test_cli.py",
    "{} has a section {}, so it is for {}": "COMMANDS",
}
"""Refusals that no line of settings provokes, with the reason."""


def typed_of(mistake: str) -> Typed:
    file = RUN
    for word, other in (("SFT ", SFT), ("TINKER ", TINKER)):
        if mistake.startswith(word):
            mistake, file = mistake.removeprefix(word), other
    devices = re.match(r"\d+x\S+(?= )", mistake)
    mistake = mistake.removeprefix(devices[0]).strip() if devices else mistake
    for word, meant in WORDS.items():
        mistake = re.sub(rf"\b{word}\b", meant, mistake)
    skip_without(mistake)
    return Typed(file, tuple(split(mistake)), devices[0] if devices else None)


def check(typed: Typed) -> str | None:
    """Check a config as `asyncrl check` does before it reads models and data."""
    path = Path("config.yaml")
    path.write_text(yaml.safe_dump(typed.file))
    nodes = described_nodes(typed.devices, 16, "256GB") if typed.devices else None
    nodes = nodes or single_node(Machine((), 8, 2**36, has_bfloat16=False))
    try:
        config = load_any(path, typed.overrides)
        if isinstance(config, RunConfig):
            for algorithm in (config.algorithm, *config.algorithms.values()):
                resolve(algorithm)
            place(config, nodes, extra_servers(config))
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            line,
            marks=[
                pytest.mark.extension(word.lower())
                for word in ("SFT", "TINKER")
                if line.startswith(word)
            ],
        )
        for line in REFUSED
    ],
)
def test_each_way_out_of_a_refusal_is_taken(line: str) -> None:
    mistake, says, ways = parts_of(line)
    typed = typed_of(mistake)
    said = check(typed)
    assert says in str(said)
    assert dead_ends(typed, check, ways) == [], said


@pytest.mark.parametrize("line", TAKEN)
def test_what_can_work_is_taken(line: str) -> None:
    assert check(typed_of(line)) is None


@pytest.mark.extension(*NAMED)
def test_each_refusal_of_settings_is_met() -> None:
    said = [check(typed_of(parts_of(line)[0])) for line in REFUSED]
    met = {name_of(one) for one in said if one is not None}
    assert {one.shown for one in all_refusals()} - met == set(NOT_PROVOKED)
    assert len(all_refusals()) > 100


# ---- commands

COMMANDS = (
    (ROOT / "tests/refused_commands.txt").read_text(encoding="utf-8").splitlines()
)
"""COMMAND -> words that it prints => COMMAND | COMMAND. Without the last part, the commands
in the printed text are followed, with RUN_DIR and CONFIG as in the first command.
"""
LOADERS = {form.command: partial(load_job, form) for form in job_forms().values()}


@pytest.fixture
def _runs(_folder: None) -> None:
    """A run of an older version, and configs."""
    with tarfile.open(ROOT / "tests/older_runs/0.1.0.tar.xz") as archive:
        archive.extractall("old/run", filter="data")
    for name, values in {
        "mine/config": CONFIG,
        "run": CONFIG,
        "sft": SFT,
        "tinker": TINKER,
    }.items():
        path = Path(f"{name}.yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(values))
    write_template("quickstart", Path("full"))


def commands_in(said: str, line: str) -> list[str]:
    words = shlex.split(line)
    meant = {"RUN_DIR": words[1:2], "CONFIG": words[1:2]}
    error = said.partition("Error: ")[2] or said  # behind the usage
    found = [f"{name}{rest}" for _, name, rest in COMMAND.findall(error)]
    return [
        shlex.join(
            part for word in shlex.split(one) for part in meant.get(word, [word])
        )
        for one in found
    ]


@pytest.mark.usefixtures("_runs")
@pytest.mark.parametrize("line", COMMANDS)
def test_commands_in_a_refusal_work(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["asyncrl", *shlex.split(command)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    mistake, _, rest = line.partition(" -> ")
    says, _, written = rest.partition(" => ")
    code, said = run(mistake)
    assert code == 2
    assert says in said
    ways = written.split(" | ") if written else commands_in(said, mistake)
    assert ways
    for way in ways:
        name, *_ = shlex.split(way)
        if name in LOADERS:  # it would train
            given = parse(shlex.split(way))
            LOADERS[name](given["config"], given["overrides"] or [])
        else:
            assert run(way)[0] == 0, way


# ---- all printed texts


FAULTS = {
    "set trainer.num_stepz=3.": "no setting trainer.num_stepz",
    "raise rollout.max_token, or wait.": "no setting rollout.max_token",
    "set buffer.filter=equal": "buffer.filter=equal: ",
    "set rollout.engine=embedded or sglang.": "rollout.engine=sglang: ",
    "set rollout.temperature to 0.": "rollout.temperature=0: ",
    "set model.chat_template_kwargs: {a: 1}, trainer.lora={rank: 0}.": "trainer.lora={rank: 0}: ",
    "run `asyncrl stopp RUN`.": "asyncrl stopp RUN: ",
    "see `asyncrl status RUN --verbos`.": "asyncrl status RUN --verbos: ",
    "give --worker-python.": "no option --worker-python",
    "pip install 'asyncrl[vlm]'": "no extra vlm",
    "`make setup-vlm` (CPU)": "no target setup-vlm",
    "docs/reward.md": "no file docs/reward.md",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_wrong_name_in_a_text_is_found(text: str) -> None:
    assert any(FAULTS[text] in fault for fault in faults_of(text))


@pytest.mark.extension(*NAMED)
def test_printed_settings_commands_and_files_exist() -> None:
    texts = [*texts_of("asyncrl"), *texts_of("servers")]
    assert len(texts) > 2500
    faults = [(text.place, fault) for text in texts for fault in faults_of(text.text)]
    assert faults == []
