"""What cannot run is refused by `asyncrl check`, and by a run before it has started a process."""

from __future__ import annotations

import json
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download
from job_runs import write_config

from asyncrl import cli
from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.run.check import look
from asyncrl.run.loop import run_job
from asyncrl.run.model_folder import find_on_disk
from asyncrl.run.serve import serve_gateway

MODULE = """
    def few(current, anchor): return current
    def loss(current_M, anchor_M, behaviour_M, advantage_M, sequence_M, settings): return current_M, {}
    def advantage(reward_B): return reward_B
    async def agent(task): return 1.0
    async def right_agent(task, session): return 1.0
    def right_advantage(reward_B, group_B): raise KeyError
    def parse(): return None
    def right_parse(text): return None
    class Broken:
        def __init__(self, size, seed): pass
        def __len__(self): return 1
        def prompt(self, index): return {}["x"]
        def score(self, prompt, completion): return 0.0
"""
MODULES = {
    "asserts_here": "raise AssertionError('no GPU')",
    "own_here": "class Own(Exception): pass\nraise Own('own')",
    "exits_here": "import sys\nsys.exit(0)",
    "threads_here": """
import threading
threading.Thread(target=threading.Event().wait).start()
def loss(current_M, anchor_M, behaviour_M, advantage_M, sequence_M, settings): return current_M, {}
""",
}
"""Modules that do something unusual when they are imported."""
ROWS = [{"prompt": "abc", "answer": "a"}, {"prompt": "abcd", "answer": "a"}]
FILES: dict[str, Any] = {"python": None, "files": ["rows.jsonl"], "reward": "math"}

REFUSED: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "a model folder that is not there": (
        {"model": {"scratch": None, "path": "models/typo"}},
        ["models/typo: there is no such folder"],
    ),
    "a model folder without config.json": (
        {"model": {"scratch": None, "path": "emptymodel"}},
        ["emptymodel has no config.json"],
    ),
    "a model folder without weights": (
        {"model": {"scratch": None, "path": "no_weights"}},
        ["no_weights has no weights"],
    ),
    "a misspelt loss": (
        {"algorithm": {"loss": "ppo_clipp"}},
        ["algorithm.loss=ppo_clipp is not known, did you mean ppo_clip?"],
    ),
    "a loss that is not there": (
        {"algorithm": {"loss": "mine_here:los"}},
        ["mine_here has no los", "did you mean loss?"],
    ),
    "a loss of another shape": (
        {"algorithm": {"loss": "mine_here:few"}},
        [
            "algorithm.loss=mine_here:few(current, anchor) cannot be called as loss(current_M, anchor_M,",
            "too many positional arguments",
        ],
    ),
    "a misspelt advantage": (
        {"algorithm": {"advantage": "grppo"}},
        ["algorithm.advantage=grppo is not known, did you mean grpo?"],
    ),
    "an advantage whose module is not there": (
        {"algorithm": {"advantage": "nomod:x"}},
        ["advantage=nomod:x: there is no module nomod"],
    ),
    "an advantage of another shape": (
        {"algorithm": {"advantage": "mine_here:advantage"}},
        ["advantage(reward_B) cannot be called as advantage(reward_B, group_B)"],
    ),
    "an agent whose module is not there": (
        {"generator": {"python": "nomod:run"}},
        ["python=nomod:run: there is no module nomod"],
    ),
    "an agent of another shape": (
        {"generator": {"python": "mine_here:agent"}},
        ["agent(task) cannot be called as (task, session)"],
    ),
    "a setting that an agent does not know": (
        {"generator": {"python": "mine_here:right_agent", "args": {"depth": 2}}},
        ["cannot be called as (task, session, depth=...)"],
    ),
    "a command that is not there": (
        {"generator": {"command": ["./nothere.sh"]}},
        ["generator.command: there is no program ./nothere.sh"],
    ),
    "a tool format whose module is not there": (
        {"gateway": {"tool_format": "nomod:parse"}},
        ["gateway.tool_format=nomod:parse"],
    ),
    "a tool format of another shape": (
        {"gateway": {"tool_format": "mine_here:parse"}},
        ["parse() cannot be called as parse(text)"],
    ),
    "a chat template that is not there": (
        {"model": {"chat_template": "nofile.jinja"}},
        ["cannot read model.chat_template=nofile.jinja"],
    ),
    "a chat template that is none": (
        {"model": {"chat_template": "broken.jinja"}},
        ["model.chat_template=broken.jinja line 1: "],
    ),
    "a chat template that is none, for an agent": (
        {"model": {"chat_template": "broken.jinja"}, "generator": {"command": ["/bin/true"]}},
        ["model.chat_template=broken.jinja line 1: "],
    ),
    "a chat template that refuses every chat, for an agent": (
        {"model": {"chat_template": "refuses.jinja"}, "generator": {"command": ["/bin/true"]}},
        ["the chat template refuses these messages: no chats", "model.chat_template=refuses.jinja"],
    ),
    "a variable that is not set": (
        {"generator": {"command": ["/bin/true"], "pass_env": ["NOT_SET_HERE"]}},
        ["generator.pass_env names NOT_SET_HERE"],
    ),
    "a variable that each rollout has": (
        {"generator": {"command": ["/bin/true"], "pass_env": ["OPENAI_API_KEY"]}},
        ["generator.pass_env has OPENAI_API_KEY; each rollout has its own value"],
    ),
    "a variable of asyncrl's own": (
        {"generator": {"command": ["/bin/true"], "pass_env": ["ASYNCRL_WORKER_KEY"]}},
        ["generator.pass_env has ASYNCRL_WORKER_KEY", "asyncrl's own"],
    ),
    "a misspelt architecture": (
        {"model": {"scratch": {"characters": "ab", "architecture": {"model_type": "qwen33"}}}},
        ["model.scratch.architecture has model_type=qwen33", "did you mean qwen3?"],
    ),
    "a model folder of a misspelt architecture": (
        {"model": {"scratch": None, "path": "odd_type"}},
        ["config.json of model.path=odd_type has model_type=qwen33", "did you mean qwen3?"],
    ),
    "a model folder that is not there, in one that is": (
        {"model": {"scratch": None, "path": "emptymodel/typo"}},
        ["model.path=emptymodel/typo: there is no such folder"],
    ),
    "a task whose module asserts": (
        {"task": {"python": "asserts_here:f"}},
        ["importing asserts_here raised AssertionError: no GPU"],
    ),
    "a tool format whose module raises its own": (
        {"gateway": {"tool_format": "own_here:f"}},
        ["gateway.tool_format=own_here:f: importing own_here raised Own: own"],
    ),
    "a task whose module exits": (
        {"task": {"python": "exits_here:f"}},
        ["importing exits_here raised SystemExit: 0"],
    ),
    "adapters on layers that are not there": (
        {"trainer": {"lora": {"targets": ["qproj"]}}},
        ["targets names qproj, and Qwen3ForCausalLM has no such layer", "q_proj"],
    ),
    "a misspelt reasoning-gym task": (
        {"task": {"python": None, "reasoning_gym": "chain_sums"}},
        ["has no such task", "did you mean chain_sum"],
    ),
    "prompts that are all too long": (
        {"rollout": {"max_prompt_tokens": 3}},
        [
            "all of the first 100 prompts of the task are longer than rollout.max_prompt_tokens=3",
            "raise rollout.max_prompt_tokens to ",
        ],
    ),
    "an eval task whose prompts are all too long": (
        {
            "task": {**FILES},
            "eval": {"task": {**FILES, "files": ["long.jsonl"]}, "num_prompts": 2},
            "rollout": {"max_prompt_tokens": 7},
        },
        ["all of the first 2 prompts of the eval task are longer"],
    ),
    "a data file that is not there": (
        {"task": {**FILES, "files": ["nowhere.jsonl"]}},
        ["nowhere.jsonl is not a file"],
    ),
    "a line that is no JSON": (
        {"task": {**FILES, "files": ["broken.jsonl"]}},
        ["broken.jsonl line 2 is not JSON"],
    ),
    "a column that is not there": (
        {"task": {**FILES, "prompt_column": "question"}},
        ["has no column question"],
    ),
    "a prompt that cannot be made, for an agent": (
        {"task": {"python": "mine_here:Broken"}, "generator": {"python": "mine_here:right_agent"}},
        ["ConfigError: prompt ", " of task.python=mine_here:Broken: making it raised KeyError: 'x'"],
    ),
    "an eval prompt that cannot be made": (
        {"eval": {"task": {"python": "mine_here:Broken"}, "num_prompts": 1}},
        [
            "ConfigError: in the section eval, prompt 0 of task.python=mine_here:Broken: making it raised "
            "KeyError: 'x'"
        ],
    ),
    "the one prompt of a task, too long": (
        {"task": {**FILES, "files": ["one.jsonl"]}, "rollout": {"max_prompt_tokens": 3}},
        ["the first prompt of the task is longer than rollout.max_prompt_tokens=3: 6 tokens"],
    ),
    "a split that is not there": (
        {
            "task": {
                "python": None,
                "dataset": "data",
                "split": "test",
                "reward": "math",
                "args": {"cache_dir": "cache"},
            }
        },
        ["split test"],
    ),
    "a role that is none": (
        {"task": {**FILES, "files": ["roles.jsonl"]}},
        ["message 0 has the role 'usr'", "roles are system, developer, user"],
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module, data, and folders that are nearly models."""
    (tmp_path / "mine_here.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "emptymodel").mkdir()
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "odd_type").mkdir()
    (tmp_path / "odd_type" / "config.json").write_text('{"model_type": "qwen33"}')
    (tmp_path / "odd_type" / "model.safetensors").touch()
    (tmp_path / "refuses.jinja").write_text("{{ raise_exception('no chats') }}")
    (tmp_path / "one.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "broken.jinja").write_text("{% for message in messages %}{{ message['content'] }}")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x", "answer": "1"}\n{"prompt": "y", "ans\n')
    (tmp_path / "long.jsonl").write_text('{"prompt": "abcdefgh", "answer": "1"}\n' * 2)
    (tmp_path / "roles.jsonl").write_text('{"prompt": [{"role": "usr", "content": "x"}], "answer": "1"}\n')
    for path in (tmp_path / "rows.jsonl", tmp_path / "data" / "train.jsonl"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "mine_here", raising=False)
    return tmp_path


@pytest.mark.parametrize(("sections", "words"), REFUSED.values(), ids=REFUSED)
def test_check_refuses_what_cannot_run_with_exit_code_2(
    sections: dict[str, Any],
    words: list[str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write_config(here, **sections)
    monkeypatch.setattr(sys, "argv", ["asyncrl", "check", str(config)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert all(word in said for word in words), said
    assert "Way out: " in said


@pytest.mark.parametrize(
    "name", ["a model folder without weights", "an agent of another shape", "a line that is no JSON"]
)
def test_a_run_refuses_the_same_before_it_has_started_a_process(name: str, here: Path) -> None:
    sections, words = REFUSED[name]
    with pytest.raises(ConfigError) as refusal:
        run_job(load_config(write_config(here, **sections)), here / "run", name="test")
    assert all(word in str(refusal.value) for word in words)
    assert not list((here / "run").glob("specs/*")), "every process is told what to do in a file"
    assert not list((here / "run").glob("logs/*-0.log"))


def test_a_gateway_refuses_the_same_before_it_has_started_an_engine(here: Path) -> None:
    sections, words = REFUSED["a command that is not there"]
    with pytest.raises(ConfigError) as refusal:
        serve_gateway(load_config(write_config(here, **sections)), here / "run", name="test")
    assert all(word in str(refusal.value) for word in words)
    assert not list((here / "run").glob("specs/*"))


def test_what_needs_the_network_is_told_and_not_looked_at(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "cache"))
    found = look(
        load_config(
            write_config(
                here,
                model={"scratch": None, "path": "who/model"},
                task={**FILES, "files": None, "dataset": "who/data"},
            )
        )
    )
    assert found.task is None
    assert [line.partition(":")[0] for line in found.lines] == ["task", "model"]
    assert all("not looked at" in line and "network" in line for line in found.lines)


def test_half_a_model_in_the_cache_of_the_hub_is_fetched_by_the_run_and_not_looked_at(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = here / "cache" / "models--who--half"
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text('{"model_type": "qwen3"}')
    (snapshot / "model.safetensors").touch()
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", partial(snapshot_download, cache_dir=here / "cache")
    )
    half = {"scratch": None, "path": "who/half"}
    assert find_on_disk(load_config(write_config(here, model=half)).model) == snapshot
    assert (
        "model: who/half is fetched from the hub"
        in look(load_config(write_config(here, model=half))).lines[-1]
    )
    with pytest.raises(ConfigError, match=r"model\.chat_template=broken\.jinja line 1"):
        look(load_config(write_config(here, model={**half, "chat_template": "broken.jinja"})))


def test_prompts_of_which_some_are_too_long_are_told_and_what_was_read_is_handed_on(here: Path) -> None:
    found = look(load_config(write_config(here, task=FILES, rollout={"max_prompt_tokens": 6})))
    assert found.notes == (
        "1 of the first 2 prompts of the task are longer than rollout.max_prompt_tokens=6 (the longest has 7 "
        "tokens): "
        "each is a failed rollout",
    )
    assert found.task is not None
    assert len(found.task) == 2


def test_functions_of_the_right_shape_pass_though_they_would_fail_when_called_and_their_threads_are_not_waited_for(
    here: Path,
) -> None:
    own = {
        "algorithm": {"loss": "threads_here:loss", "advantage": "mine_here:right_advantage"},
        "generator": {"python": "mine_here:right_agent"},
    }
    found = look(load_config(write_config(here, gateway={"tool_format": "mine_here:right_parse"}, **own)))
    assert (found.lines, found.notes) == (("task: asyncrl.tasks.letters:Letters, 200 prompts",), ())


@pytest.mark.parametrize("code", [0, 7])
def test_functions_that_end_their_process_when_they_are_imported_are_refused_too(
    here: Path, code: int
) -> None:
    (here / "leaves_here.py").write_text(f"import os\nprint('bye', flush=True)\nos._exit({code})\n")
    with pytest.raises(ConfigError, match=rf"ended with exit code {code}: bye"):
        look(load_config(write_config(here, algorithm={"loss": "leaves_here:loss"})))
