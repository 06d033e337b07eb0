"""Configs load with their types; wrong keys and conflicts are refused with what to
write instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig, SftConfig, load_config, run_config_yaml
from asyncrl.config.fields import FrozenConfig
from asyncrl.config.transports import refuse_transport
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
    overrides = [
        "buffer.max_staleness=4",
        "rollout.timeout_s=none",
        "observe.console=none",
    ]
    config = load_config(
        good, [*overrides, "task.args.limit=null", "trainer.betas=[0.9, 0.99]"]
    )
    assert (config.buffer.max_staleness, config.rollout.timeout_s) == (4, None)
    assert (config.observe.console, config.task.args) == ("none", {"limit": None})
    assert (config.trainer.betas, config.trainer.num_groups) == ((0.9, 0.99), 4)
    good.write_text(GOOD + "rollout: {timeout_s: none}\nobserve: {console: none}\n")
    in_file = load_config(good)
    assert (in_file.rollout.timeout_s, in_file.observe.console) == (None, "none")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("- a\n", r'in ".*good\.yaml", line[^$]*correct line 5 or the one before'),
        ("trainer: {num_steps: 9}\n", "trainer appears twice, in lines 4 and 5"),
        ("seed: {a: 1, a: 1}\n", "a appears twice, in lines 5 and 5"),
        ("\tseed: 1\n", "indent line 5 with spaces"),
        (
            'generator: {stop: ["end", "\\uD83D"]}\n',
            r"generator\.stop\.1 in .*good\.yaml is not valid Unicode: '\\ud83d'",
        ),
        (
            'generator: {args: {"\\uD83D": "\\uD83D"}}\n',
            r"a key of generator\.args in .*good\.yaml is not valid Unicode: '\\ud83d'",
        ),
    ],
)
def test_invalid_config_file_is_refused_with_the_place(
    good: Path, more: str, says: str
) -> None:
    good.write_text(GOOD + more)
    assert re.search(says, refusal(good))
    good.unlink()
    assert "No such file" in refusal(good)


def test_wrong_value_in_one_form_of_a_union_has_the_written_key(good: Path) -> None:
    assert "placement.trainer.nodes=0 on" in refusal(good, "placement.trainer.nodes=0")
    assert "rollout.num_engines.max=0 on" in refusal(good, "rollout.num_engines.max=0")


@pytest.mark.parametrize(
    "key", ["trainer.learning_rate", "task.share", "rollout.simulated.sigma"]
)
def test_numbers_that_json_cannot_hold_are_refused(good: Path, key: str) -> None:
    assert f"{key}=inf on the command line: Input should be a finite number" in refusal(
        good, "rollout.engine=simulated", f"{key}=.inf"
    )


def test_spaces_in_one_argument_are_named(good: Path) -> None:
    assert "write seed=3, without spaces" in refusal(good, "seed = 3")


@pytest.mark.parametrize("value", ["2024-13-45", "[" * 3000, "{a: 1"])
def test_invalid_yaml_value_is_a_config_error(good: Path, value: str) -> None:
    assert "is not a key of a section with a YAML value" in refusal(
        good, f"task.args.x={value}"
    )
    good.write_text(f"{GOOD}\nseed: {value}\n")
    assert "cannot read the config" in refusal(good)


def test_several_tasks_have_names_shares_and_overrides_of_their_own(
    good: Path, tmp_path: Path
) -> None:
    words = "{dataset: openai/gsm8k, reward: math, name: words}"
    tasks = f"task=[{{files: [data/sums.v2.jsonl], reward: math}}, {words}, {{python: 'a.b:Letters'}}]"
    config = load_config(
        good,
        [tasks, "task.words.split=none", "task.0.system_prompt=none", "task.2.size=7"],
    )
    assert list(config.tasks) == ["sums-v2", "words", "Letters"]
    assert [config.tasks["words"].split, config.tasks["Letters"].size] == ["none", 7]
    (tmp_path / "written.yaml").write_text(run_config_yaml(config))
    assert load_config(tmp_path / "written.yaml") == config
    shares = [
        f"task.{number}.share={share}" for number, share in enumerate((0.5, 0.25, 3e-1))
    ]
    assert list(load_config(good, [tasks, *shares]).shares.values()) == [10, 5, 6]


def test_the_written_config_is_read_back_with_its_types(
    good: Path, tmp_path: Path
) -> None:
    values = [
        "{1: 0.5}",
        "2024-01-01 10:00:00",
        '"a\\x85b\\u2028c"',
        "!!binary aGVsbG8=",
        "[1, 1.0]",
    ]
    overrides = [f"task.args.x{number}={value}" for number, value in enumerate(values)]
    config = load_config(good, [*overrides, "rollout.timeout_s=none"])
    again = tmp_path / "again.yaml"
    again.write_text(run_config_yaml(config))
    assert repr(load_config(again)) == repr(config), (
        "1 == 1.0, yet they are not the same"
    )


MISSPELT = """
buffer.max-stalenes=4 -> buffer.max_staleness
bufer.max_staleness=1 -> buffer
trainer.max_staleness=2 -> buffer.max_staleness
eval.steps=5 ->
"""


@pytest.mark.parametrize("line", MISSPELT.strip().splitlines())
def test_misspelled_key_is_named_with_the_closest_valid_key(
    good: Path, line: str
) -> None:
    override, right = line.split(" ->")
    message = refusal(good, override, "eval.task.python=a:b")
    key = override.partition("=")[0].removesuffix(
        ".max_staleness" if right == " buffer" else ""
    )
    assert f"{key} on the command line is not a known key" in message
    assert ("did you mean" in message) == bool(right)
    assert not right or f"did you mean{right}?" in message


def test_all_problems_are_reported_at_once_with_their_values(good: Path) -> None:
    wrong = ["trainer.num_groups=0", "rollout.temperature=-1", "gateway.port=70000"]
    message = refusal(good, *wrong, "buffer.max_stalenes=4", "task.files=mine.jsonl")
    for override in wrong:
        assert override.partition("=")[0] in message
    assert "buffer.max_stalenes" in message
    assert "write task.files=[mine.jsonl]" in message


WRITTEN = """
model=hub/id -> model={path: hub/id}
placement=cpu -> placement={trainer: cpu, rollout: cpu}
trainer.lora=16 -> trainer.lora={rank: 16}
trainer.lora=true -> trainer.lora={}
teacher=hub/id -> teacher={path: hub/id}
generator.command=python my_agent.py -> generator.command=[python, my_agent.py]
generator.command=sh -c 'a b' -> generator.command=[sh, -c, a b]
task.files=my rows.jsonl -> task.files=[my rows.jsonl]
generator.stop=END -> generator.stop=[END]
rollout.timeout_s=None -> rollout.timeout_s=none
"""


@pytest.mark.parametrize("line", WRITTEN.strip().splitlines())
def test_what_an_error_says_to_write_is_taken(good: Path, line: str) -> None:
    wrong, right = line.split(" -> ")
    message = refusal(good, wrong)
    assert f"{wrong.partition('=')[0]}=" in message
    assert " on the command line: " in message
    way_out = "write none" if right.endswith("=none") else f"write {right}."
    assert way_out in message
    try:
        load_config(good, [right])
    except ConfigError as error:
        next_rule = str(error)
    else:
        next_rule = ""
    assert "belongs there" not in next_rule


@pytest.mark.parametrize("text", ["", "- a\n", "text\n", "model: hub/id\n"])
def test_a_file_that_is_no_section_of_settings_is_named(good: Path, text: str) -> None:
    good.write_text(text)
    message = refusal(good)
    assert f" in {good}: " in message
    named = "write model={path: hub/id}" if "model" in text else "init quickstart`"
    assert named in message


HERE = "rollout.engine=vllm rollout.urls=['http://127.0.0.1:8000']"
TAUGHT = "teacher.path=a/b algorithm.distill_weight=1"
OWN = "task.verifiers=true task.files=none task.reward=none"
TWO = "task=[{python: 'a:B'}, {python: 'a:C', name: c}]"
LORA = (
    "rollout.engine=vllm trainer.lora={rank: 16} weight_sync.transport=lora"
    " model.dtype=bfloat16"
)
EVALS = (
    "eval=[{name: often, every: 5, task: {python: 'a:B'}},"
    " {name: seldom, every: 20, task: {python: 'a:B'}}]"
)
REFUSED = r"""
buffer.max_staleness=2 buffer.look_ahead=4 -> look_ahead=4 is above buffer.max_staleness=2
task.files=none -> exactly one of python, files, dataset, reasoning_gym
OWN -> set both generator.verifiers and task.verifiers
task.verifiers=true task.files=none task.system_prompt=Hi task.reward=none -> write generator.args.taskset
task.verifiers=true task.files=none task.reward=none task.args={task: {}} -> write generator.args.taskset.task
model.path=none -> give one of model.path
model.path=none model.scratch={characters: ab, architecture: {}} model.revision=v1 -> model.scratch has none
generator.python=a:b generator.command=[c] -> give at most one of python, command, verifiers, openenv, remote
generator.python=a:b generator.stop=[x] -> stop is for a single turn, not for python; remove it
task.python=a:b task.files=none task.reward=none task.digest=x -> task.digest is of the data of task.files
TWO task.size=3 -> say which one, and its key: 0, 1, c
TWO task.0.share=2 -> task.share is given for 1 of 2 tasks
TWO task.0.share=0.123456 task.c.share=1 -> repeat after 17554 prompts, 10000 at most
TWO task.c.name=B -> two of `task` are called B; give each a different task.name
eval=[{task: {python: 'a:B'}}, {engine: own, task: {python: 'c:D'}}] -> set it to auto in each
eval.task.python=a:b eval.name=task -> an evaluation cannot be called task
eval.task.python=a:b checkpoint.keep_best=x -> checkpoint.keep_best=x: there is no such evaluation
EVALS checkpoint.keep_best=often checkpoint.every=6 -> checkpoint.every=6 must divide eval.every=5
eval.task.python=a:b eval.name=failure -> an evaluation cannot be called failure
eval.task.verifiers=true -> set both eval.task.verifiers and the verifiers of its generator
eval.task.python=a:b eval.task.generator={python: 'a:b', workers: 2} -> generator.workers cannot differ
eval.task.python=a:b eval.task.limits={max_calls: 3} -> eval.task.limits.max_calls is for agents
eval.task.python=a:b eval.task.limits={max_tokens: 999} -> eval.task.limits.max_tokens=999 is above
eval.task.python=a:b eval.top_p=0.5 -> top_p has no effect at temperature=0; set
eval.task.python=a:b eval.top_p=0.5 eval.temperature=1 rollout.engine=simulated -> simulated has no top_p
trainer.mini_batches=3 -> trainer.mini_batches=3 must divide trainer.num_groups=8
algorithm.kl_coefficient=0.1 algorithm.kl_in=reward -> set kl_estimator=k1
teacher.path=a/b -> set both teacher.path and algorithm.distill_weight
TWO TAUGHT teacher.tasks=[sums] -> teacher.tasks has sums, which is not a task; the tasks are B, c
TAUGHT teacher.tasks=[sums] -> the tasks are unnamed
TWO TAUGHT teacher.tasks=[c] -> task.B has 0 teachers; name each task in the teacher.tasks of one teacher
TAUGHT buffer.filter=equal_rewards -> to learn from; set buffer.filter=none
algorithm.router_replay=true rollout.engine=simulated -> rollout.engine=embedded or vllm, not simulated
TAUGHT algorithm.reward_weight=0 algorithm.overlong_tokens=8 -> kl_in=reward have no effect
HERE rollout.num_engines=2 -> name each server once, and set rollout.num_engines=1
rollout.engine=vllm rollout.urls=['http://h:1','http://h:1'] rollout.num_engines=2 -> rollout.num_engines=1
generator.worker_python=python3 -> is for agents of `python` or `command`; remove it
placement.actor=all -> trainer, rollout, eval, teacher, judge, reward; actor is placement.trainer here
algorithm.advantage=gae trainer.offload.by_layer=true critic.offload.weights=never -> remove critic.offload
placement.trainer,rollout=cpu placement.rollout=cpu -> rollout is placed twice; name it in one key
TAUGHT teacher.offload=sometimes -> 'always'
placement.trainer=0-1024 -> a range has at most 1024 devices
placement.reward=[0,0] -> give auto, cpu, a device number, a list like [4, 5], or a range like 4-7
rollout.num_engines={min: 3, max: 2} -> min=3 is above max=2
rollout.num_engines={max: 2} buffer.max_staleness=0 placement.rollout=trainer -> rollout.num_engines=2, or
rollout.urls=['http://host:8000/v1'] -> String should match pattern
HERE model.path=none model.scratch={architecture: {}, characters: ab} -> made at the start of the run
weight_sync.transport=disk -> to a folder that trainer and engines share
HERE weight_sync.transport=nccl -> needs engines that the run itself starts
rollout.engine=vllm rollout.urls=['http://10.0.0.7:8000'] -> which http://10.0.0.7:8000 cannot read
weight_sync.transport=lora -> set trainer.lora={rank: 16}
LORA -> set weight_sync.transport=auto, which pushes merged weights, or model.dtype=float32
rollout.top_p=0 -> rollout.top_p
rollout.top_p=1.1 -> rollout.top_p
rollout.top_k=-1 -> rollout.top_k
rollout.min_p=1.5 -> rollout.min_p
rollout.engine=simulated rollout.top_k=50 -> engine=simulated does not report the tokens that it sampled from
rollout.engine=simulated rollout.min_p=0.1 -> set engine: embedded or vllm, or top_p: 1, top_k: 0 and min_p: 0
TAUGHT rollout.top_p=0.9 -> set rollout.top_p=1, rollout.top_k=0 and rollout.min_p=0
observe.trackers=[wandbb] -> there are tensorboard, wandb, mlflow, trackio
rollout.engine=simulated weight_sync.transport=nccl -> device to device, and rollout.engine=simulated has no
"""
TAKEN = r"""
TAUGHT algorithm.reward_weight=0 rollout.group_size=1
rollout.top_p=0.9 rollout.top_k=1000000 rollout.min_p=1
rollout.engine=vllm rollout.top_k=50
TWO task.0.share=0.7 task.c.share=0.3 task.c.size=7
EVALS checkpoint.keep_best=seldom checkpoint.every=10
rollout.engine=vllm rollout.urls=['http://h:1'] weight_sync.disk_dir=/data
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: some/model}\ntask: {files: [data.jsonl], reward: 'my:reward'}\n"
    )
    return path


def settings(line: str) -> list[str]:
    for word, meant in {
        "HERE": HERE,
        "OWN": OWN,
        "TAUGHT": TAUGHT,
        "TWO": TWO,
        "EVALS": EVALS,
        "LORA": LORA,
    }.items():
        line = line.replace(word, meant)
    return re.split(r" (?=[a-z_]+\.)", line)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            line, marks=[pytest.mark.extension("openenv")] * ("openenv" in line)
        )
        for line in REFUSED.strip().splitlines()
    ],
)
def test_conflicting_settings_are_refused_with_the_values_to_write(
    path: Path, line: str
) -> None:
    given, _, says = line.partition(" -> ")
    with pytest.raises(ConfigError) as caught:
        place(
            load_config(path, settings(given)),
            single_node(Machine((), 8, 2**36, has_bfloat16=False)),
        )
    assert says in str(caught.value)


def test_local_transport_is_refused_on_two_nodes(path: Path) -> None:
    config = load_config(path, ["weight_sync.transport=shm"])
    with pytest.raises(
        ConfigError, match="the run is on 2 nodes: its file is in the shared memory"
    ):
        refuse_transport(
            config, ["cuda:0"], ["cuda:1"], is_colocated=False, num_nodes=2
        )


@pytest.mark.parametrize("line", TAKEN.strip().splitlines())
def test_what_can_work_is_taken(path: Path, line: str) -> None:
    load_config(path, settings(line))


def numbers_of(form: type[BaseModel], seen: set[type]) -> Iterator[tuple[type, str]]:
    """Yield (section, key) of every setting that takes numbers and no boolean."""
    if form in seen:
        return
    seen.add(form)
    for name, info in form.model_fields.items():
        # A dict keeps the order, which a set of types does not.
        types = dict.fromkeys(types_in(info.annotation))
        if not {int, float}.isdisjoint(types) and bool not in types:
            yield form, name
        for kind in types:
            if isinstance(kind, type) and issubclass(kind, FrozenConfig):
                yield from numbers_of(kind, seen)


def types_in(annotation: object) -> Iterator[object]:
    yield annotation
    for part in get_args(annotation):
        yield from types_in(part)


NUMBERS = [
    pytest.param(form, name, id=f"{form.__name__}.{name}")
    for root in (RunConfig, SftConfig)
    for form, name in numbers_of(root, set())
]


@pytest.mark.parametrize(("form", "name"), NUMBERS)
@pytest.mark.parametrize("value", [True, [True], [0.5, False], {"7": True}])
def test_a_boolean_is_not_a_number(
    form: type[BaseModel], name: str, value: object
) -> None:
    with pytest.raises(ValidationError) as caught:
        form.model_validate({name: value})
    assert name in [error["loc"][0] for error in caught.value.errors()]


def test_a_boolean_for_a_number_is_named_with_its_key(good: Path) -> None:
    assert len(NUMBERS) > 150
    message = refusal(good, "trainer.num_steps=true", "trainer.betas=[0.9, yes]")
    assert "trainer.num_steps='true' on" in message
    assert "trainer.betas.1='true' on" in message
    latency = ["rollout.engine=simulated", "rollout.simulated.sigma=true"]
    assert "rollout.simulated.sigma='true' on" in refusal(good, *latency)
