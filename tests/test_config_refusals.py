"""Settings that exclude each other are refused with what to write instead, when they are read or placed; what
can work is taken.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.config import load_config
from asyncrl.config.placement_sync import refuse_transport
from asyncrl.launch.devices import place
from asyncrl.launch.machine import Machine, single_node

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
OWN -> set both, or none
task.verifiers=true task.files=none task.system_prompt=Hi task.reward=none -> taskset.system_prompt
OWN task.args={a: 1} -> does not reach a verifiers
task.python=a:B task.files=none -> a python task scores itself
task.reward=none -> task.reward is missing
model.path=none -> give one of model.path
model.path=none model.scratch={characters: ab, architecture: {}} model.revision=v1 -> model.scratch has none
generator.python=a:b generator.command=[c] -> give at most one of python, command, verifiers, remote
generator.python=a:b generator.stop=[x] -> is for a single turn, and the generator is python; remove it
generator.give_answer=true -> give_answer=True is for python or command or
generator.python=a:b generator.outcomes=none task.reward=none -> no harness returns a reward
task.share=0 -> Input should be greater than 0
task.name=a.b -> task.name='a.b'
task.python=a:b task.files=none task.reward=none task.digest=x -> task.digest is of the data of task.files
TWO task.size=3 -> say which one, and its key: 0, 1, c
TWO task.0.share=2 -> task.share is given for 1 of 2 tasks
TWO task.0.share=0.123456 task.c.share=1 -> repeat after 17554 prompts, above the limit of 10000
TWO task.c.name=B -> two of `task` are called B; give each a different task.name
eval=[{task: {python: 'a:B'}}, {engine: own, task: {python: 'c:D'}}] -> the same; set it to auto in each
eval.engine=rollout eval.task.python=a:b placement.eval=cpu -> set placement.eval=auto, or eval.engine=own
eval.task.python=a:b eval.name=task -> an evaluation cannot be called task
eval.task.python=a:b checkpoint.keep_best=x -> checkpoint.keep_best=x is no evaluation of this run
EVALS checkpoint.keep_best=often checkpoint.every=6 -> checkpoint.every=6 must divide eval.every=5
OWN generator.verifiers=x eval.task.verifiers=true -> cannot be evaluated
eval.task.python=a:b eval.samples=2 -> all the same at eval.temperature=0
trainer.mini_batches=3 -> trainer.mini_batches=3 must divide trainer.num_groups=8
trainer.cpu_offload=true placement.trainer=cpu -> needs a CUDA device
rollout.group_size=1 -> algorithm.advantage=grpo compares the rollouts of a prompt
checkpoint.keep_best=true -> must divide eval.every=None
checkpoint.keep_every=7 -> keep_every=7 is not a multiple of every=50
algorithm.overlong_tokens=900 -> above rollout.max_tokens=256
algorithm.kl_coefficient=0.1 algorithm.kl_in=reward -> set algorithm.kl_estimator=k1
teacher.path=a/b -> algorithm.distill_weight=0.0 with a section `teacher`: set
TAUGHT buffer.filter=equal_rewards -> could learn from; set buffer.filter=none
algorithm.router_replay=true rollout.engine=simulated -> which rollout.engine=simulated does not report
TAUGHT algorithm.reward_weight=0 algorithm.overlong_tokens=8 -> a penalty in the reward has no effect
rollout.simulated.sigma=0 -> rollout.simulated is for rollout.engine=simulated
rollout.vllm={block-size: 32} -> rollout.vllm is for rollout.engine=vllm, and rollout.engine=embedded; set
HERE rollout.num_engines=2 -> name each server once, or set rollout.num_engines=1
rollout.engine=vllm rollout.urls=['http://h:1','http://h:1/'] rollout.num_engines=2 -> rollout.num_engines=1
rollout.num_engines={min: 3, max: 2} -> {'min': 3, 'max': 2} is no range: min must be at most max
HERE rollout.num_engines={max: 2} -> rollout.num_engines is a range, and the run neither starts nor ends
rollout.num_engines={max: 2} buffer.max_staleness=0 placement.rollout=trainer -> rollout.num_engines=2, or
rollout.urls=['http://host:8000/v1'] -> write a server like http://10.0.0.7:8000, without a path
HERE model.path=none model.scratch={architecture: {}, characters: ab} -> which is made at the start
rollout.engine=vllm weight_sync.canary_limit=0 -> weight_sync.canary_limit
weight_sync.transport=disk -> give a folder that trainer and engines share
weight_sync.transport=shm weight_sync.disk_dir=/data -> disk writes each version there, and no other does
HERE weight_sync.transport=nccl -> needs engines that the run itself starts
rollout.engine=vllm rollout.urls=['http://10.0.0.7:8000'] -> which http://10.0.0.7:8000 cannot read
weight_sync.transport=lora -> set trainer.lora={rank: 16}
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
