"""Reads a config: YAML plus `key=value` overrides. A wrong key is answered with the closest right one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a config. `overrides` are `section.key=value`, the value as YAML (`none` = null).

    Raises ConfigError, which names every wrong key and value, where it stands, and the closest right key.
    """
    values = _read(Path(path))
    for override in overrides:
        _apply(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(dict(problem), str(path)) for problem in error.errors()]
        raise ConfigError(
            "\n  ".join(lines),
            way_out="correct the file or the key=value after it; `asyncrl check CONFIG` validates without "
            "starting a run.",
        ) from error


def run_config_yaml(config: RunConfig) -> str:
    """The resolved config as YAML, which load_config reads back as the same: a key 1 stays a number, a date a
    date, .inf itself.
    """
    return yaml.dump(config.model_dump(), Dumper=_AsRead, sort_keys=False, allow_unicode=True)


class _AsRead(yaml.SafeDumper):
    """Escapes the line ends of Unicode, which YAML would fold into a plain one when it reads them back."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar(
            "tag:yaml.org,2002:str", data, style='"' if re.search("[\x85\u2028\u2029]", data) else None
        )


_AsRead.add_representer(str, _AsRead.represent_str)


class _KeysOnce(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, where YAML lets the second one silently replace the
    first.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a section", node.start_mark, f"{key.value} is there twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


OTHER_NAMES = {
    "lr": "trainer.learning_rate",
    "batch_size": "trainer.num_groups",
    "train_batch_size": "trainer.num_groups",
    "steps": "trainer.num_steps",
    "max_steps": "trainer.num_steps",
    "mini_batch_size": "trainer.mini_batches",
    "lr_schedule": "trainer.schedule",
    "lr_scheduler": "trainer.schedule",
    "warmup": "trainer.warmup_steps",
    "grad_clip": "trainer.max_grad_norm",
    "num_generations": "rollout.group_size",
    "rollouts_per_prompt": "rollout.group_size",
    "max_new_tokens": "rollout.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "r": "trainer.lora.rank",
    "staleness": "buffer.max_staleness",
    "max_off_policy_steps": "buffer.max_staleness",
    "staleness_threshold": "buffer.max_staleness",
    "beta": "algorithm.kl_coefficient",
    "kl_coef": "algorithm.kl_coefficient",
    "kl_beta": "algorithm.kl_coefficient",
    "clip_eps": "algorithm.clip_low",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "model_name_or_path": "model.path",
    "dataset_name": "task.dataset",
    "run_dir": "--run-dir",
    "output_dir": "--run-dir",
}
"""What other frameworks call a setting of ours, by the last part of the key, where that stands in the section
of ours or in none.
"""
EXPLAINED = {"trainer.mini_batches": "how many parts a batch is cut into, and no size"}
"""Settings that are proposed for a key of another meaning."""

_NO_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What yaml raises: 2024-13-45 is a date to it, 0x_ a number, and both are a ValueError; [[[[... is a
RecursionError.
"""


def _parse(text: str, kind: type[yaml.SafeLoader], name: str) -> Any:
    """What the text says; `name` is how errors call its place. Raises what _NO_YAML has."""
    loader = kind(text)
    loader.name = name
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _unshared(value: Any, around: tuple[int, ...] = ()) -> Any:
    """The same without aliases: each place has sections of its own, so that an override changes one. Raises
    ValueError for a cycle.
    """
    if not isinstance(value, dict | list):
        return value
    if id(value) in around:
        raise ValueError("an alias stands inside of what it is an alias of")
    around = (*around, id(value))
    if isinstance(value, dict):
        return {key: _unshared(item, around) for key, item in value.items()}
    return [_unshared(item, around) for item in value]


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the config {path}: {error}",
            way_out="give the path of a YAML file, e.g. configs/quickstart.yaml.",
        ) from error
    try:
        values = _unshared(_parse(text, _KeysOnce, str(path)))
    except _NO_YAML as error:
        raise ConfigError(
            f"{path} cannot be read as YAML: {error}", way_out="correct that line or value."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds {type(values).__name__}, not sections",
            rule="a config is a YAML mapping (model:, task:, ...)",
            way_out="start from configs/quickstart.yaml.",
        )
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(
            f"override {override!r} is not key=value", way_out="write it like buffer.max_staleness=4."
        )
    *sections, name = key.split(".")
    target: Any = values
    for section in sections:
        target = target.setdefault(section, {}) if isinstance(target, dict) else None
        if target is None:
            break
    if not isinstance(target, dict):
        raise ConfigError(
            f"override {override!r}: {'.'.join(sections)} is not a section",
            way_out="give a key of a section, like trainer.num_steps=10.",
        )
    try:
        is_free = key not in all_keys()  # inside task.args, say: no model is there to know what none means
        target[name] = None if text == "none" and is_free else _unshared(_parse(text, yaml.SafeLoader, key))
    except _NO_YAML as error:
        raise ConfigError(
            f"override {override[:80]!r}: the value is not YAML: {str(error)[:400]}",
            way_out="quote the value.",
        ) from error


def _explain(problem: Mapping[str, Any], path: str) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "config"
    if problem["type"] == "extra_forbidden":
        closest = _closest(problem["loc"])
        meaning = f" ({EXPLAINED[closest]})" if closest in EXPLAINED else ""
        return f"{where} in {path} is not a known key" + (
            f"; did you mean {closest}{meaning}?" if closest else "."
        )
    if problem["type"] == "missing":
        return f"{where} is missing in {path}."
    if problem["type"] in ("list_type", "tuple_type") and isinstance(problem["input"], str):
        return (
            f"{where}={problem['input']} in {path} is one text, and {where} is a list: write "
            f"{where}=[{problem['input']}]."
        )
    message = str(problem["msg"]).removeprefix("Value error, ")
    value = "" if isinstance(problem["input"], dict) else f"={problem['input']!r}"
    return f"{where}{value} in {path}: {message}."


def _closest(location: Sequence[str | int]) -> str | None:
    """The known key nearest to a wrong one: by another name that it goes by, by its name in another section,
    then by its letters in its own section, then anywhere.
    """
    known = all_keys()
    wrong = ".".join(map(str, location))
    section, _, name = wrong.rpartition(".")
    other = OTHER_NAMES.get(name, "")
    if other and (not section or section == other.rpartition(".")[0] or other.startswith("--")):
        return other
    if len(same := [key for key in known if key.rpartition(".")[2] == name]) == 1:
        return same[0]
    by_name = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    if found := difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.65):
        return by_name[found[0]]
    elsewhere = (
        [key for key in known if section not in (key, key.rpartition(".")[0])] if section in known else known
    )
    if found := difflib.get_close_matches(wrong, elsewhere, n=1, cutoff=0.75):
        return found[0]
    by_name = {key.rpartition(".")[2]: key for key in known}
    if found := difflib.get_close_matches(name, list(by_name), n=1, cutoff=0.75):
        return by_name[found[0]]
    return None


def all_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every key of the config by its full dotted name, sections included, in the order of the models."""
    keys = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += all_keys(kind, f"{prefix}{name}.")
    return keys
