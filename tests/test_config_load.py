"""Configs load with their types, and a wrong key is named with the closest valid one."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.config import load_config, run_config_yaml
from asyncrl.config.load import OTHER_NAMES, all_keys, name_of_config

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
    config = load_config(good, [*overrides, "task.args.limit=none", "trainer.betas=[0.9, 0.99]"])
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
trainer.lr=1 -> trainer.learning_rate
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


def test_keys_of_other_frameworks_are_refused_with_our_key() -> None:
    keys = {*all_keys(), "--run-dir"}
    assert set(OTHER_NAMES.values()) <= keys
    assert not set(OTHER_NAMES) & {key.rpartition(".")[2] for key in keys}


def test_all_problems_are_told_at_once_each_with_its_value(good: Path) -> None:
    wrong = ["trainer.num_groups=0", "rollout.temperature=-1", "gateway.port=70000"]
    message = refusal(good, *wrong, "buffer.max_stalenes=4", "task.files=mine.jsonl")
    for override in wrong:
        assert override.partition("=")[0] in message
    assert "buffer.max_stalenes" in message
    assert "write task.files=[mine.jsonl]" in message


@pytest.mark.parametrize(
    ("path", "name"), [("configs/quickstart.yaml", "quickstart"), ("runs/mine/config.yaml", "mine")]
)
def test_config_of_a_run_directory_is_named_after_the_run(path: str, name: str) -> None:
    assert name_of_config(Path(path)) == name
