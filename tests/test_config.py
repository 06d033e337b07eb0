"""Configs load with their types; wrong keys and conflicts are refused with what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.config import load_config, run_config_yaml
from asyncrl.config.placement_sync import refuse_transport
from asyncrl.launch.machine import Machine, single_node
from asyncrl.launch.placement import place

GOOD = """
model: {path: some/model}
task: {files: [data.jsonl], reward: "my:reward"}
trainer: {num_groups: 4}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError, match="Way out") as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_overrides_replace_values_and_none_turns_a_field_off(good: Path) -> None:
    overrides = ["buffer.max_staleness=4", "rollout.timeout_s=none", "observe.console=none"]
    config = load_config(good, [*overrides, "task.args.limit=null", "trainer.betas=[0.9, 0.99]"])
    assert (config.buffer.max_staleness, config.rollout.timeout_s) == (4, None)
    assert (config.observe.console, config.task.args) == ("none", {"limit": None})
    assert (config.trainer.betas, config.trainer.num_groups) == ((0.9, 0.99), 4)
    good.write_text(GOOD + "rollout: {timeout_s: none}\nobserve: {console: none}\n")
    in_file = load_config(good)
    assert (in_file.rollout.timeout_s, in_file.observe.console) == (None, "none")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a known key|valid dictionary"),
        ("- a\n- b\n", "valid dictionary"),
        (GOOD + "rollout: {timeout_s: [}\n", r'in ".*bad\.yaml", line 5'),
        (GOOD + "trainer: {num_steps: 9}\n", "trainer is there twice"),
        (None, "No such file"),
    ],
)
def test_invalid_config_file_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(path)
    assert "bad.yaml" in str(caught.value)


@pytest.mark.parametrize("value", ["2024-13-45", "0x_", "9" * 5000, "[" * 3000, "{[a]: 1}", "'", "{a: 1"])
def test_invalid_yaml_value_is_a_config_error(good: Path, value: str) -> None:
    assert "is not a key of a section with a YAML value" in refusal(good, f"task.args.x={value}")
    good.write_text(f"{GOOD}\nseed: {value}\n")
    assert "cannot read the config" in refusal(good)


def test_several_tasks_have_names_shares_and_overrides_of_their_own(good: Path, tmp_path: Path) -> None:
    sources = (
        "{files: [data/sums.v2.jsonl], reward: math}",
        "{dataset: openai/gsm8k, reward: math, name: words}",
    )
    tasks = f"task=[{', '.join(sources)}, {{python: 'a.b:Letters'}}, {{reasoning_gym: 2wiki}}]"
    config = load_config(good, [tasks, "task.words.split=none", "task.0.system_prompt=none", "task.2.size=7"])
    assert list(config.tasks) == ["sums-v2", "words", "Letters", "task-2wiki"]
    assert set(config.shares.values()) == {1}
    assert [config.tasks["words"].split, config.tasks["Letters"].size] == ["none", 7]
    (tmp_path / "written.yaml").write_text(run_config_yaml(config))
    assert load_config(tmp_path / "written.yaml") == config
    shares = [f"task.{number}.share={share}" for number, share in enumerate((0.5, 0.25, 3e-1, 0.2))]
    assert list(load_config(good, [tasks, *shares]).shares.values()) == [10, 5, 6, 4]
    one = load_config(good, ["task=[{python: 'a:B', name: b}]"])
    assert (list(one.tasks), one.task[0].called) == ([""], "b")  # type: ignore[index]


@pytest.mark.parametrize("override", ["novalue", "=3", "seed.deep=3", "model.path.deep=3"])
def test_an_override_that_is_no_key_and_value_is_refused(good: Path, override: str) -> None:
    refusal(good, override)


TYPED = ["{1: 0.5}", "2024-01-01 10:00:00", '"a\\x85b\\u2028c"', "!!binary aGVsbG8=", "[1, 1.0]"]


@pytest.mark.parametrize("text", TYPED)
def test_the_written_config_is_read_back_with_its_types(good: Path, tmp_path: Path, text: str) -> None:
    keys = ("task.args.x", "eval.task.args.x", "generator.args.x", "rollout.vllm.x")
    more = ["eval.task.python=my:Task", "generator.python=my:agent", "rollout.engine=vllm"]
    config = load_config(good, [*(f"{key}={text}" for key in keys), *more, "rollout.timeout_s=none"])
    again = tmp_path / "again.yaml"
    again.write_text(run_config_yaml(config))
    assert load_config(again) == config
    assert repr(load_config(again)) == repr(config), "1 == 1.0, yet they are not the same"


@pytest.mark.parametrize("aliased", ["*t", "{<<: *t, shuffle: false}"])
def test_override_changes_only_its_section_of_a_yaml_anchor(good: Path, aliased: str) -> None:
    task = "{python: 'asyncrl.tasks.toy:Letters', args: {n: 1}, size: 10}"
    good.write_text(f"model: {{path: m}}\ntask: &t {task}\neval: {{task: {aliased}}}\n")
    config = load_config(good, ["task.size=99", "task.args.n=5"])
    assert (config.task.size, config.task.args) == (99, {"n": 5})
    assert config.eval is not None
    assert (config.eval.task.size, config.eval.task.args) == (10, {"n": 1})


MISSPELT = """
buffer.max-stalenes=4 -> buffer.max_staleness
bufer.max_staleness=1 -> buffer
trainer.max_staleness=2 -> buffer.max_staleness
eval.steps=5 ->
"""


@pytest.mark.parametrize("line", MISSPELT.strip().splitlines())
def test_misspelled_key_is_named_with_the_closest_valid_key(good: Path, line: str) -> None:
    override, right = line.split(" ->")
    message = refusal(good, override, "eval.task.python=a:b")
    key = override.partition("=")[0].removesuffix(".max_staleness" if right == " buffer" else "")
    assert f"{key} in {good} is not a known key" in message
    assert ("did you mean" in message) == bool(right)
    assert not right or f"did you mean{right}?" in message


def test_all_problems_are_told_at_once_each_with_its_value(good: Path) -> None:
    wrong = ["trainer.num_groups=0", "rollout.temperature=-1", "gateway.port=70000"]
    message = refusal(good, *wrong, "buffer.max_stalenes=4", "task.files=mine.jsonl")
    for override in wrong:
        assert override.partition("=")[0] in message
    assert "buffer.max_stalenes" in message
    assert "write task.files=[mine.jsonl]" in message


HERE = "rollout.engine=vllm rollout.urls=['http://127.0.0.1:8000/']"
TAUGHT = "teacher.path=a/b algorithm.distill_weight=1"
OWN = "task.verifiers=true task.files=none task.reward=none"
TWO = "task=[{python: 'a:B'}, {python: 'a:C', name: c}]"
EVALS = (
    "eval=[{name: often, every: 5, task: {python: 'a:B'}}, {name: seldom, every: 20, task: {python: 'a:B'}}]"
)
REFUSED = r"""
buffer.max_staleness=2 buffer.look_ahead=4 -> look_ahead=4 is above buffer.max_staleness=2
task.files=none -> exactly one of python, files, dataset, reasoning_gym
OWN -> set both generator.verifiers and task.verifiers
task.verifiers=true task.files=none task.system_prompt=Hi task.reward=none -> write generator.args.taskset
OWN task.args={a: 1} -> does not reach a verifiers
task.python=a:B task.files=none -> a python task scores itself
task.reward=none -> task.reward is missing
model.path=none -> give one of model.path
model.path=none model.scratch={characters: ab, architecture: {}} model.revision=v1 -> model.scratch has none
generator.python=a:b generator.command=[c] -> give at most one of python, command, verifiers, remote
generator.python=a:b generator.stop=[x] -> stop is for a single turn, not for python; remove it
generator.give_answer=true -> give_answer is for python or command or
generator.python=a:b generator.outcomes=none task.reward=none -> task.reward is missing
task.share=0 -> Input should be greater than 0
task.name=a.b -> task.name='a.b'
task.python=a:b task.files=none task.reward=none task.digest=x -> task.digest is of the data of task.files
TWO task.size=3 -> say which one, and its key: 0, 1, c
TWO task.0.share=2 -> task.share is given for 1 of 2 tasks
TWO task.0.share=0.123456 task.c.share=1 -> repeat after 17554 prompts, 10000 at most
TWO task.c.name=B -> two of `task` are called B; give each a different task.name
eval=[{task: {python: 'a:B'}}, {engine: own, task: {python: 'c:D'}}] -> set it to auto in each
eval.engine=rollout eval.task.python=a:b placement.eval=cpu -> set placement.eval=auto, or eval.engine=own
eval.task.python=a:b eval.name=task -> an evaluation cannot be called task
eval.task.python=a:b checkpoint.keep_best=x -> checkpoint.keep_best=x is no evaluation of this run
EVALS checkpoint.keep_best=often checkpoint.every=6 -> checkpoint.every=6 must divide eval.every=5
OWN generator.verifiers=x eval.task.verifiers=true -> cannot be evaluated
eval.task.python=a:b eval.samples=2 -> all the same at temperature=0
trainer.mini_batches=3 -> trainer.mini_batches=3 must divide trainer.num_groups=8
trainer.cpu_offload=true placement.trainer=cpu -> needs a CUDA device
rollout.group_size=1 -> algorithm.advantage=grpo compares the rollouts of a prompt
checkpoint.keep_best=true -> must divide eval.every=None
checkpoint.keep_every=7 -> keep_every=7 is not a multiple of every=50
algorithm.overlong_tokens=900 -> overlong_tokens=900 > rollout.max_tokens=256
algorithm.kl_coefficient=0.1 algorithm.kl_in=reward -> set kl_estimator=k1
teacher.path=a/b -> set both teacher.path and algorithm.distill_weight
TAUGHT buffer.filter=equal_rewards -> to learn from; set buffer.filter=none
algorithm.router_replay=true rollout.engine=simulated -> rollout.engine=embedded or vllm, not simulated
TAUGHT algorithm.reward_weight=0 algorithm.overlong_tokens=8 -> kl_in=reward have no effect
rollout.simulated.sigma=0 -> simulated is for rollout.engine=simulated, not embedded
rollout.vllm={block-size: 32} -> vllm is for rollout.engine=vllm, not embedded
HERE rollout.num_engines=2 -> name each server once, and set rollout.num_engines=1
rollout.engine=vllm rollout.urls=['http://h:1','http://h:1/'] rollout.num_engines=2 -> rollout.num_engines=1
rollout.num_engines={min: 3, max: 2} -> min=3 is above max=2
HERE rollout.num_engines={max: 2} -> name each server once, and set rollout.num_engines=1
rollout.num_engines={max: 2} buffer.max_staleness=0 placement.rollout=trainer -> rollout.num_engines=2, or
rollout.urls=['http://host:8000/v1'] -> write a server like http://10.0.0.7:8000, without a path
HERE model.path=none model.scratch={architecture: {}, characters: ab} -> made at the start of the run
rollout.engine=vllm weight_sync.canary_limit=0 -> weight_sync.canary_limit
weight_sync.transport=disk -> to a folder that trainer and engines share
weight_sync.transport=shm weight_sync.disk_dir=/data -> only disk writes there
HERE weight_sync.transport=nccl -> needs engines that the run itself starts
rollout.engine=vllm rollout.urls=['http://10.0.0.7:8000'] -> which http://10.0.0.7:8000 cannot read
weight_sync.transport=lora -> set trainer.lora={rank: 16}
observe.trackers=[wandbb] -> there are tensorboard, wandb, mlflow, trackio
observe.tracker_args={wandb: {}} -> tracker_args has wandb, but trackers does not
rollout.engine=simulated weight_sync.transport=nccl -> device to device, and rollout.engine=simulated has no
"""
TAKEN = r"""
rollout.num_engines={min: 2, max: 4}
rollout.engine=vllm rollout.vllm={max-num-batched-tokens: 4096} rollout.tensor_parallel=2
TAUGHT algorithm.reward_weight=0 rollout.group_size=1
TWO task.0.share=0.7 task.c.share=0.3 task.c.size=7
EVALS checkpoint.keep_best=seldom checkpoint.every=10
rollout.engine=vllm rollout.urls=['http://[::1]:1']
rollout.engine=vllm rollout.urls=['http://h:1'] weight_sync.transport=disk weight_sync.disk_dir=/data
rollout.engine=vllm rollout.urls=['http://h:1'] weight_sync.disk_dir=/data
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: some/model}\ntask: {files: [data.jsonl], reward: 'my:reward'}\n")
    return path


def settings(line: str) -> list[str]:
    for word, meant in {"HERE": HERE, "OWN": OWN, "TAUGHT": TAUGHT, "TWO": TWO, "EVALS": EVALS}.items():
        line = line.replace(word, meant)
    return re.split(r" (?=[a-z_]+\.)", line)


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_conflicting_settings_are_refused_with_the_values_to_write(path: Path, line: str) -> None:
    given, _, says = line.partition(" -> ")
    with pytest.raises(ConfigError) as caught:
        place(load_config(path, settings(given)), single_node(Machine((), 8, 2**36, has_bfloat16=False)))
    assert says in str(caught.value)


ON_TWO_NODES = r"""
weight_sync.transport=shm -> its file is in the shared memory of one machine
rollout.engine=vllm weight_sync.transport=ipc -> handles name memory of one machine's devices
"""


@pytest.mark.parametrize("line", ON_TWO_NODES.strip().splitlines())
def test_local_transport_is_refused_on_two_nodes(path: Path, line: str) -> None:
    given, _, says = line.partition(" -> ")
    config = load_config(path, settings(given))
    with pytest.raises(ConfigError, match="the run is on 2 nodes") as caught:
        refuse_transport(config, ["cuda:0"], ["cuda:1"], is_turns=False, num_nodes=2)
    assert says in str(caught.value)
    assert "set weight_sync.transport=stream" in str(caught.value)


@pytest.mark.parametrize("line", TAKEN.strip().splitlines())
def test_what_can_work_is_taken(path: Path, line: str) -> None:
    load_config(path, settings(line))
