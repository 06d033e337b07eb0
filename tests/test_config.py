"""Configs load with their types; wrong keys and conflicts are refused with what to
write instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from printed_texts import types_in
from pydantic import BaseModel, ValidationError

from asyncrl.base.errors import ConfigError
from asyncrl.config import load_config, run_config_yaml
from asyncrl.config.fields import FrozenConfig
from asyncrl.config.load import job_forms, load_any

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
        ("seed: 010\n", "YAML reads 010 in base 8 or 60; write it in base 10"),
        ("rollout: {timeout_s: 1:30}\n", "YAML reads 1:30 in base 8 or 60"),
        (
            'generator: {stop: ["end", "\\uD83D"]}\n',
            r"'\\ud83d' is not valid Unicode(.|\n)*good.yaml\", line 5, column 27",
        ),
        (
            'generator: {args: {"\\uD83D": "\\uD83D"}}\n',
            r"'\\ud83d' is not valid Unicode(.|\n)*good.yaml\", line 5, column 20",
        ),
    ],
)
def test_invalid_config_file_is_refused_with_the_place(
    good: Path, more: str, says: str
) -> None:
    good.write_text(GOOD + more)
    assert re.search(says, refusal(good))
    good.write_text(GOOD, encoding="utf-16")
    assert "save the file as UTF-8" in refusal(good)
    good.unlink()
    assert "No such file" in refusal(good)


def test_wrong_value_in_one_form_of_a_union_has_the_written_key(good: Path) -> None:
    assert "placement.trainer.nodes=0 on" in refusal(good, "placement.trainer.nodes=0")
    assert "rollout.num_engines.max=0 on" in refusal(good, "rollout.num_engines.max=0")
    assert "config on" in refusal(good, "checkpoint.keep_best=true")
    good.write_text(GOOD + "checkpoint: {keep_best: true}\n")
    assert f"config in {good}" in refusal(good, "rollout.slots=8")


@pytest.mark.parametrize(
    "key", ["trainer.learning_rate", "task.share", "rollout.simulated.sigma"]
)
def test_numbers_that_json_cannot_hold_are_refused(good: Path, key: str) -> None:
    assert f"{key}=inf on the command line: Input should be a finite number" in refusal(
        good, f"{key}=.inf"
    )


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
        "1e-6",
        "'1e-6'",
    ]
    overrides = [f"task.args.x{number}={value}" for number, value in enumerate(values)]
    config = load_config(good, [*overrides, "rollout.timeout_s=none"])
    assert [config.task.args["x5"], config.task.args["x6"]] == [1e-6, "1e-6"]
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


HINTS = """
trainer=none -> leave it out for its defaults
trainer.lora=no -> write none
rollout.num_engines=few -> a section belongs there, with min, max
model.chat_template_kwargs=x -> like model.chat_template_kwargs={name: value}
trainer.learning_rate=1% -> a number belongs there, like 0.01
trainer.num_steps= -> a number belongs there, like 100
trainer.learning_rate=[1e-3, 1e-4] -> `asyncrl sweep` takes several
trainer={num_steps: 1, num_steps: 2} -> num_steps appears twice
task.files=[*.jsonl] -> *, $ and ~ are not expanded
task.files=[${HOME}/a.jsonl] -> *, $ and ~ are not expanded
placement={trainer: -> quote it, or the shell splits it
task.reward=1.0 -> one function belongs there, as module:name
"""


@pytest.mark.parametrize("line", HINTS.strip().splitlines())
def test_wrong_value_is_refused_with_the_kind_that_belongs_there(
    good: Path, line: str
) -> None:
    wrong, hint = line.split(" -> ")
    assert hint in refusal(good, wrong)


@pytest.mark.parametrize("text", ["", "- a\n", "text\n", "model: hub/id\n"])
def test_a_file_that_is_no_section_of_settings_is_named(good: Path, text: str) -> None:
    good.write_text(text)
    message = refusal(good)
    assert f" in {good}: " in message
    named = "write model={path: hub/id}" if "model" in text else "init quickstart`"
    assert named in message


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


NUMBERS = [
    pytest.param(form, name, id=f"{form.__name__}.{name}")
    for root in job_forms().values()
    for form, name in numbers_of(root, set())
]


@pytest.mark.parametrize(("form", "name"), NUMBERS)
def test_a_boolean_is_not_a_number(form: type[BaseModel], name: str) -> None:
    for value in (True, [True], [0.5, False], {"7": True}):
        with pytest.raises(ValidationError) as caught:
            form.model_validate({name: value})
        assert name in [error["loc"][0] for error in caught.value.errors()]


def test_a_boolean_for_a_number_is_named_with_its_key(good: Path) -> None:
    assert len(NUMBERS) > 100
    message = refusal(good, "trainer.num_steps=true", "trainer.betas=[0.9, yes]")
    assert "trainer.num_steps='true' on" in message
    assert "trainer.betas.1='true' on" in message


def test_config_is_read_from_a_pipe(good: Path) -> None:
    read, write = os.pipe()
    os.write(write, good.read_bytes())
    os.close(write)
    assert load_any(f"/dev/fd/{read}") == load_any(good)
    os.close(read)
