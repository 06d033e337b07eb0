"""Reading a config: what is right is kept, what is wrong is named with the closest right key."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import load_config, run_config_yaml
from asyncrl.config.load import OTHER_NAMES, all_keys
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parent.parent
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


def test_overrides_replace_values_and_none_is_the_off_word(good: Path) -> None:
    config = load_config(
        good, ["buffer.max_staleness=4", "rollout.timeout_s=none", "trainer.betas=[0.9, 0.99]"]
    )
    assert config.buffer.max_staleness == 4
    assert config.rollout.timeout_s is None
    assert config.trainer.betas == (0.9, 0.99)
    assert config.trainer.num_groups == 4


def test_none_is_the_off_word_in_the_file_too_and_a_word_where_it_is_a_choice(good: Path) -> None:
    good.write_text(GOOD + "rollout: {timeout_s: none}\nobserve: {console: none}\n")
    config = load_config(good)
    assert config.rollout.timeout_s is None
    assert config.observe.console == "none"
    assert load_config(good, ["observe.console=none", "task.system_prompt=none"]) == config
    assert load_config(good, ["task.args.limit=none"]).task.args == {"limit": None}


def test_broken_yaml_is_named_by_its_file_or_its_key(good: Path) -> None:
    with pytest.raises(ConfigError, match=r'in "task.args", line 1'):
        load_config(good, ["task.args={a: 1"])
    good.write_text(GOOD + "rollout: {timeout_s: [}\n")
    with pytest.raises(ConfigError, match=f'in "{good}", line 5'):
        load_config(good)


def test_one_text_where_a_list_belongs_is_refused_with_what_to_write(good: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"task.files=mine.jsonl in .* is one text, and .* a list: write task.files=\[mine.jsonl\]",
    ):
        load_config(good, ["task.files=mine.jsonl"])


def test_a_section_that_stands_twice_is_refused_and_not_half_forgotten(good: Path) -> None:
    good.write_text(GOOD + "trainer: {num_steps: 9}\n")
    with pytest.raises(ConfigError, match="trainer is there twice"):
        load_config(good)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.port=70000",
        "rollout.ports=[0]",
        "rollout.threads=0",
        "trainer.threads=-1",
        "trainer.betas=[0.9, 1]",
    ],
)
def test_numbers_that_would_break_a_process_later_are_refused_at_once(good: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config(good, [override])


def test_the_resolved_config_reads_back_as_itself(good: Path, tmp_path: Path) -> None:
    config = load_config(good, ["rollout.timeout_s=none"])
    again = tmp_path / "again.yaml"
    again.write_text(run_config_yaml(config))
    assert load_config(again) == config


@pytest.mark.parametrize(
    "text",
    [
        "{1: 0.5}",
        ".inf",
        "-.inf",
        "2024-01-01",
        "2024-01-01 10:00:00",
        "{'1': none}",
        '"a\\x85b\\u2028c"',
        "!!binary aGVsbG8=",
        "[1, 1.0]",
    ],
)
def test_free_settings_of_the_written_config_are_read_back_with_their_types(
    good: Path, tmp_path: Path, text: str
) -> None:
    keys = ("task.args.x", "eval.task.args.x", "generator.args.x", "rollout.vllm.x")
    config = load_config(
        good,
        [
            *(f"{key}={text}" for key in keys),
            "eval.task.python=my:Task",
            "generator.python=my:agent",
            "rollout.engine=vllm",
        ],
    )
    again = tmp_path / "again.yaml"
    again.write_text(run_config_yaml(config))
    read = load_config(again)
    assert read == config
    assert repr(read) == repr(config), "1 == 1.0, yet they are not the same"


@pytest.mark.parametrize("aliased", ["*t", "{<<: *t, shuffle: false}"])
def test_an_override_changes_its_own_section_alone_where_the_file_uses_one_twice(
    good: Path, aliased: str
) -> None:
    good.write_text(
        f"model: {{path: m}}\ntask: &t\n  python: asyncrl.tasks.letters:Letters\n  args: {{n: 1}}\n  size: "
        f"10\neval: {{task: {aliased}}}\n"
    )
    config = load_config(good, ["task.size=99", "task.args.n=5"])
    assert (config.task.size, config.task.args) == (99, {"n": 5})
    assert config.eval is not None
    assert (config.eval.task.size, config.eval.task.args) == (10, {"n": 1})


@pytest.mark.parametrize(
    "value", ["2024-13-45", "0x_", "9" * 5000, "[" * 3000, "&a [*a]", "&a {b: [*a]}", "{[a]: 1}", "'"]
)
def test_a_value_that_yaml_fails_on_in_any_way_is_a_config_error(good: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="the value is not YAML"):
        load_config(good, [f"task.args.x={value}"])
    good.write_text(f"{GOOD}\nseed: {value}\n")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_config(good)


def test_a_config_is_frozen(good: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(good).trainer.num_groups = 5  # type: ignore[misc]


def test_what_other_frameworks_call_a_key_is_no_key_here_and_stands_for_one() -> None:
    keys = {*all_keys(), "--run-dir"}
    assert [right for right in OTHER_NAMES.values() if right not in keys] == []
    assert not set(OTHER_NAMES) & {key.rpartition(".")[2] for key in keys}


@pytest.mark.parametrize(
    ("override", "wrong", "right"),
    [
        ("buffer.max_stalenes=4", "buffer.max_stalenes", "buffer.max_staleness"),
        ("trainer.lr_rate=1", "trainer.lr_rate", "trainer."),
        ("group_size=4", "group_size", "rollout.group_size"),
        ("bufer.max_staleness=1", "bufer", "buffer"),
        ("trainer.lr=1", "trainer.lr", "trainer.learning_rate"),
        ("lr=1", "lr", "trainer.learning_rate"),
        ("trainer.batch_size=8", "trainer.batch_size", "trainer.num_groups"),
        ("rollout.max_new_tokens=8", "rollout.max_new_tokens", "rollout.max_tokens"),
        ("trainer.output_dir=x", "trainer.output_dir", "--run-dir"),
        (
            "trainer.mini_batch_size=2",
            "trainer.mini_batch_size",
            "trainer.mini_batches (how many parts a batch is cut into, and no size)",
        ),
        ("trainer.max_staleness=2", "trainer.max_staleness", "buffer.max_staleness"),
    ],
)
def test_a_misspelt_key_is_named_with_the_closest_right_one(
    good: Path, override: str, wrong: str, right: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(good, [override])
    message = str(caught.value)
    assert f"{wrong} in {good} is not a known key" in message
    if wrong != "trainer.lr_rate":
        assert f"did you mean {right}?" in message
    assert "Way out:" in message


@pytest.mark.parametrize(
    "override", ["eval.steps=5", "checkpoint.steps=5", "rollout.batch_size=8", "rollout.lr=1"]
)
def test_a_setting_of_another_section_with_another_meaning_is_not_proposed(good: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(good, [override, "eval.task.python=a:b"])
    assert "is not a known key" in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_all_problems_are_told_at_once(good: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(good, ["trainer.num_groups=0", "buffer.max_stalenes=4", "rollout.temperature=-1"])
    message = str(caught.value)
    assert "trainer.num_groups=0" in message
    assert "buffer.max_stalenes" in message
    assert "rollout.temperature=-1" in message


def test_a_look_ahead_above_the_bound_is_refused_with_both_values(good: Path) -> None:
    with pytest.raises(ConfigError, match="buffer.look_ahead=4 is above buffer.max_staleness=2"):
        load_config(good, ["buffer.max_staleness=2", "buffer.look_ahead=4"])


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "model: [unclosed\n", "42"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config"):
        load_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("override", ["novalue", "=3", "seed.deep=3", "model.path.deep=3"])
def test_an_override_that_is_no_key_and_value_is_refused(good: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="Way out"):
        load_config(good, [override])


@pytest.mark.parametrize("given", ["task.python=a:B", "task.files=none"])
def test_a_task_has_exactly_one_source(good: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="exactly one of python, files, dataset, reasoning_gym"):
        load_config(good, [given])


def test_every_key_has_a_meaning() -> None:
    from asyncrl.config.describe import sections

    keys = [key for _, _, keys in sections() for key in keys]
    assert len(keys) >= 60
    assert not [key.name for key in keys if len(key.meaning) < 8]


def test_fixed_names_are_there() -> None:
    fixed = """seed model.path rollout.group_size rollout.num_engines rollout.engine rollout.slots rollout.max_tokens rollout.temperature
    rollout.timeout_s buffer.max_staleness buffer.look_ahead buffer.on_overdue trainer.num_groups trainer.num_steps trainer.world_size
    trainer.learning_rate algorithm.loss algorithm.advantage weight_sync.transport weight_sync.interrupt""".split()  # noqa: E501
    assert set(fixed) <= set(all_keys())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid(path: Path) -> None:
    load_config(path)
