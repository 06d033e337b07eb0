"""Build the task of a config, or only its score function: files, Hugging Face datasets,
Python, reasoning-gym (https://github.com/open-thought/reasoning-gym), sources of
extensions, and the `math` reward.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import xxhash

from asyncrl.base.errors import ConfigError, needing
from asyncrl.base.extensions import load_place
from asyncrl.base.files import write_whole
from asyncrl.base.user_code import (
    NOT_USERS,
    check_call,
    load_object,
    message_of,
    raised,
)
from asyncrl.config import EvalConfig, GeneratorConfig, RunConfig, TaskConfig
from asyncrl.config.eval_config import EVAL_SEED
from asyncrl.config.run_config import key_of
from asyncrl.config.task_config import ADDED_SOURCES, SCORING
from asyncrl.messages.records import Prompt
from asyncrl.messages.tokens import NO_COMPLETION
from asyncrl.tasks.prompt_source import PromptSource, TaskPrompts
from asyncrl.tasks.rewards import (
    RewardFunction,
    UnreadableAnswer,
    UserCodeFailed,
    math_reward,
    optional,
    reward_function,
    score_of,
    user_code,
)
from asyncrl.tasks.task import GroupTask, Item, PromptTask, RowTask

EvalTask = tuple[PromptTask, tuple[Prompt, ...]]
Rows = tuple[Sequence[Mapping[str, Any]], Callable[[int], str]]
"""(rows, name of a row in errors)."""


def build_task(
    config: TaskConfig,
    seed: int,
    *,
    is_evaluated: bool = False,
) -> PromptTask:
    """Return the task of a config, with its data read. `is_evaluated`: of
    task.split={eval: ...}, take the held-out rows. Raises ConfigError.
    """
    assert config.source not in ADDED_SOURCES, "look_at_task() builds these"
    if config.python is not None:
        return _python_task(config, config.python, seed)
    if config.reasoning_gym is not None:
        return GymTask(
            config.reasoning_gym, size=config.size, seed=seed, settings=config.args
        )
    score = reward_function(config)
    if config.dataset is not None:
        rows, place = read_dataset(config.dataset, config.split_of_dataset, config.args)
    else:
        rows, place = read_files(config.files or [], config.args)
    return RowTask(rows, place, score, config, is_evaluated)


def build_score(config: TaskConfig, seed: int) -> RewardFunction:
    """Build only the score function."""
    if config.uses_math:
        # The import of math-verify takes seconds, which are not an answer's time.
        math_reward(Prompt("0/0", ()), "1", "1")
    # Each reward process builds this, and must not read all rows into its memory.
    if config.source not in SCORING:
        return reward_function(config)
    return score_of(build_task(config, seed))[0]


def look_at_task(
    config: TaskConfig,
    seed: int,
    *,
    generator: GeneratorConfig = GeneratorConfig(),
    is_evaluated: bool = False,
    reads_all: bool = False,
) -> tuple[PromptTask | None, str]:
    """Return the task and its description before the start. The task is None if only
    the run may read it, which `reads_all`. Raises like build_task.
    """
    is_on_hub = config.dataset is not None and not os.path.exists(config.dataset)  # noqa: PTH110
    if is_on_hub and not reads_all:
        reward_function(config)
        return (
            None,
            f"dataset {config.dataset}, split {config.split_of_dataset}; not checked: it is on the hub",
        )
    task: PromptTask | None
    if config.source in ADDED_SOURCES:
        find_tasks = load_place(ADDED_SOURCES[config.source])
        task, source = find_tasks(config, generator, reads_all=reads_all)
    else:
        task = build_task(config, seed, is_evaluated=is_evaluated)
        gym = config.reasoning_gym and f"reasoning-gym {config.reasoning_gym}"
        source = config.python or gym or config.dataset or ", ".join(config.files or [])
    if task is None:
        return None, source
    if len(task) == 0:
        raise ConfigError(
            f"the task has no prompts; it reads {source or 'no file'}",
            way_out="give it data with one prompt or more.",
        )
    digest = f", digest {task.digest}" if isinstance(task, RowTask) else ""
    return task, f"{source}, {len(task)} prompts{digest}"


def make_prompt_source(
    config: RunConfig,
    tasks: Mapping[str, PromptTask],
    *,
    on_epoch: Callable[[str, int, str], None] = lambda name, epoch, text: None,
) -> PromptSource:
    sources = [
        TaskPrompts(
            tasks[name],
            seed=config.seed,
            shuffle=settings.shuffle,
            system_prompt=settings.system_prompt,
            label=name,
            by_difficulty=settings.sampling == "by_difficulty",
        )
        for name, settings in config.tasks.items()
    ]
    shares = config.shares if len(sources) > 1 else None
    return PromptSource(*sources, shares=shares, on_epoch=on_epoch)


# ---- tasks of evaluations


def take_prompts(config: EvalConfig, task: PromptTask, label: str) -> EvalTask:
    """Return the task and its held-out prompts, the same in every run. `label`: prefix
    of their ids. Raises ConfigError.
    """
    if len(task) < config.num_prompts:
        raise ConfigError(
            f"num_prompts={config.num_prompts} is above the {len(task)} prompts of its task",
            way_out=f"set {key_of('eval', label)}.num_prompts={len(task)}, or give a larger task.",
        )
    prompts = TaskPrompts(
        task,
        seed=EVAL_SEED,
        shuffle=False,
        system_prompt=config.task.system_prompt,
        label=label,
    )
    return task, tuple(prompts.make(0, index) for index in range(config.num_prompts))


# ---- Python


def _python_task(config: TaskConfig, spec: str, seed: int) -> PromptTask:
    said = f"task.python={spec}"
    factory = load_object(spec, "task.python")
    keywords = {"size": config.size, "seed": seed, **config.args}
    usage = f"{spec.partition(':')[2]}({', '.join(f'{name}={value!r}' for name, value in keywords.items())})"
    check_call(factory, (), keywords, said=said, usage=usage)
    try:
        with user_code(KeyboardInterrupt):  # Ctrl-C during a check
            task = factory(**keywords)
    except UserCodeFailed as failure:
        raise ConfigError(
            f"{said}: {usage} {failure}",
            way_out="correct task.args, task.size, or the task.",
        ) from failure
    is_group = hasattr(task, "score_group")
    if not isinstance(task, GroupTask if is_group else PromptTask):
        raise ConfigError(
            f"{said} made a {type(task).__name__}, which lacks a method",
            rule="a task has __len__(), prompt(index), and score(prompt, completion) or "
            "score_group(prompt, completions)",
            way_out="add it; examples/my_task.py shows one.",
        )
    check_call(task.prompt, (0,), {}, said=said, usage="prompt(index)")
    score, takes_group = score_of(task)
    if takes_group:
        usage = "score_group(prompt, completions)"
        check_call(score, (None, [""]), {}, said=said, usage=usage)
    else:
        usage = "score(prompt, completion)"
        asked = optional(score, NO_COMPLETION)
        check_call(score, (None, ""), asked, said=said, usage=usage)
    return cast(PromptTask, task)


# ---- rows


def read_files(
    paths: Sequence[str], settings: Mapping[str, object], key: str = "task.files"
) -> Rows:
    """Return the rows of files that the setting `key` names. Raises ConfigError."""
    if settings:
        args = f"{key.partition('.')[0]}.args"
        raise ConfigError(
            f"{args}={settings}, and files have no settings",
            way_out=f"remove {args}.",
        )
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ConfigError(
            f"{key}={paths} names a file twice, and its rows would count once",
            way_out="name it once; task.share weighs tasks against each other.",
        )
    rows: dict[str, Mapping[str, Any]] = {}
    # Functions of os.path never raise, as for a name too long or a loop of links.
    for path in map(Path, paths):
        reader = READERS.get(path.suffix)
        if reader is None or not os.path.isfile(path):  # noqa: PTH113
            raise ConfigError(
                f"{key}: {path} is not a file with rows ({', '.join(READERS)}) in {Path.cwd()}",
                way_out="write the whole path of each file, without ~, $ and *; convert other files to "
                ".jsonl.",
            )
        try:
            rows |= reader(path)
        except ImportError:
            raise
        except Exception as error:
            # of many kinds: OverflowError for a date after 9999, unknown time zones
            raise ConfigError(
                f"{key}: {path} cannot be read: {message_of(error)}",
                way_out="correct the file; .jsonl has a JSON object on each line, .json also one array of "
                "objects.",
            ) from error
    return [*rows.values()], [*rows].__getitem__


def _read_json(path: Path) -> dict[str, Mapping[str, object]]:
    """Read an object per line, or one array of objects. Raises ValueError."""
    content = path.read_bytes()
    if b"\0" in content:
        raise ValueError("it has a zero byte; JSON is UTF-8 here, not UTF-16 or UTF-32")
    content = content.removeprefix(codecs.BOM_UTF8)
    is_array = content.lstrip().startswith(b"[")
    unit = "item" if is_array else "line"
    found: dict[str, Mapping[str, object]] = {}
    for number, part in enumerate(
        json.loads(content, object_pairs_hook=_unique_keys)
        if is_array
        else content.splitlines(),
        start=1,
    ):
        if is_array or part.strip():
            try:
                row = (
                    part
                    if is_array
                    else json.loads(part, object_pairs_hook=_unique_keys)
                )
                found[f"{path} {unit} {number}"] = {**row}
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{unit} {number} is not a JSON object: {error}: {part!r:.80}"
                ) from error
    return found


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object's fields. Raises ValueError for a key that it has twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return fields


def _read_parquet(path: Path) -> dict[str, Mapping[str, object]]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    found: dict[str, Mapping[str, object]] = {}
    for number, row in enumerate(table.to_pylist()):
        found[f"{path} row {number}"] = {
            name: _with_json(row[name], table.schema.field(name).type) for name in row
        }
    return found


def _with_json(value: Any, kind: Any) -> Any:
    """Decode what a column of datasets.Json() stores as text, at any depth."""
    if value is None or "arrow.json" not in str(kind):
        return value
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if isinstance(value, dict):
        return {name: _with_json(value[name], kind[name].type) for name in value}
    return [_with_json(item, kind.value_type) for item in value]


READERS = {".jsonl": _read_json, ".json": _read_json, ".parquet": _read_parquet}


def read_dataset(
    name: str, split: str, settings: Mapping[str, object], section: str = "task"
) -> Rows:
    """Read a dataset of the hub, or of a folder. `settings` go to
    `datasets.load_dataset`. A folder may come from `save_to_disk` or contain data
    files. Raises ConfigError, with keys of the `section`.
    """
    if os.path.isfile(name):  # noqa: PTH113
        raise ConfigError(
            f"{section}.dataset={name} is a file",
            rule="a dataset is a hub id or a folder",
            way_out=f"write {section}.files=[{name}], and {section}.dataset=none.",
        )
    import datasets
    from datasets.features.features import _visit

    shown = f"{section}.dataset={name}, split {split}"
    try:
        if any(
            (Path(name) / file).is_file()
            for file in ("state.json", "dataset_dict.json")
        ):
            rows: Any = datasets.load_from_disk(name)
            if isinstance(rows, Mapping):
                if split not in rows:
                    raise ValueError(f"the folder has the splits {', '.join(rows)}")
                rows = rows[split]
        else:
            rows = datasets.load_dataset(name, split=split, **settings)
        for column, feature in rows.features.items():
            # _visit is private, but reaches features within lists and structs, too.
            if (stored := _visit(feature, _undecoded)) != feature:
                rows = rows.cast_column(column, stored)
        len(rows)  # a stream has no length
    except Exception as error:  # file formats and the hub raise various errors
        raise ConfigError(
            f"{shown} cannot be loaded: {type(error).__name__}: {error}",
            way_out=f"check hub id or folder, {section}.split, subset ({section}.args: {{name: ...}}), "
            "and network.",
        ) from error
    return rows, lambda index: f"{shown}, row {index}"


def _undecoded(feature: Any) -> Any:
    """Leave images, audio and video as their bytes: a decoded one has no fixed digest."""
    # JSON is decoded. The class is newer than the oldest release that is allowed.
    is_media = hasattr(feature, "decode") and type(feature).__name__ != "Json"
    return replace(feature, decode=False) if is_media else feature


DATA_PIN = "data.json"


class DataPin:
    """Digests of the data that a run began with; construction compares."""

    def __init__(
        self,
        run_dir: Path,
        digests: Mapping[str, str],
        *,
        is_free: bool = False,
        section: str = "task",
    ) -> None:
        """Compare `digests`, by task, with those in the file. `is_free`: accept any
        data. `section`: of the settings that name them. Raises ConfigError.
        """
        self.path = run_dir / DATA_PIN
        self._digests = dict(digests)
        saved = (
            json.loads(self.path.read_bytes())
            if self.path.exists() and not is_free
            else {}
        )
        for name, digest in digests.items():
            if saved.get(name, digest) != digest:
                raise ConfigError(
                    f"the data of {key_of(section, name)} have changed since this run began",
                    rule="a resumed run continues with its data",
                    way_out=f"restore them, or accept the change with --allow-change {section}.digest.",
                )

    def write(self) -> None:
        if self._digests:
            write_whole(self.path, json.dumps(self._digests, indent=1) + "\n")


CODE_PIN = "code.json"
NAMES_OF_CODE = re.compile(r'"([\w./-]+(?::[A-Za-z_][\w.]*|\.py|\.sh|\.jinja))"')


def record_code(run_dir: Path, config: RunConfig, step: int) -> list[str]:
    """Record the code that `config` names, which runs from `step` on; return what
    changed since the last record. Blocks.

    The file has a list of {"step", "changed", "files": {"helpers.py of
    my_reward:score": digest}}.
    """
    path = run_dir / CODE_PIN
    records = json.loads(path.read_bytes()) if path.exists() else []
    files = dict[str, str]()
    for name in NAMES_OF_CODE.findall(config.model_dump_json()):
        code = _files_of(name)
        for file in code:
            place = os.path.relpath(file, code[0].parent)
            digest = xxhash.xxh3_128_hexdigest(file.read_bytes())
            files[f"{place} of {name}"] = digest
    # The first record of a run counts nothing as changed.
    before = records[-1]["files"] if records else files
    changed = [name for name in files if files[name] != before.get(name)]
    if changed or not records:
        records.append({"step": step, "changed": changed, "files": files})
        write_whole(path, json.dumps(records, indent=1) + "\n")
    return changed


def _files_of(name: str) -> list[Path]:
    """Return the file of a loaded `module:function` or of a path, and the files of the
    user's modules that are loaded from the folder of its topmost package.
    """
    module = sys.modules.get(name.partition(":")[0])
    path = Path(getattr(module, "__file__", None) or name)
    if not path.is_file():
        return []
    if module is None:
        return [path]
    depth = module.__name__.count(".") + (path.stem == "__init__")
    top = path.parents[depth]
    found = [path]
    for other in list(sys.modules.values()):
        file = getattr(other, "__file__", None) or ""
        if Path(file).is_relative_to(top) and not file.startswith(NOT_USERS):
            found.append(Path(file))
    return found


# ---- libraries


class GymTask:
    """Score the last <answer> tags with the library's score_answer, or the whole
    completion without tags.
    """

    def __init__(
        self, name: str, *, size: int, seed: int, settings: Mapping[str, object]
    ) -> None:
        with needing("harness", f"task.reasoning_gym={name}"):
            from reasoning_gym.factory import create_dataset
            from reasoning_gym.utils import extract_answer
        try:
            self._dataset = create_dataset(name, size=size, seed=seed, **settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"task.reasoning_gym={name} with task.args={dict(settings)}: {error}",
                way_out="choose a task and settings of reasoning-gym.",
            ) from error
        self._extract = extract_answer

    def __len__(self) -> int:
        return len(self._dataset)

    def prompt(self, index: int) -> Item:
        """Metadata go to `answer`, which they often reveal."""
        entry = self._dataset[index]
        return Item(
            entry["question"],
            answer={"answer": entry["answer"], "metadata": entry["metadata"]},
        )

    def score(self, prompt: Prompt, completion: str) -> float:
        answer = self._extract(completion)
        entry = {"question": prompt.messages[-1]["content"], **prompt.answer}
        said = completion.strip() if answer is None else answer
        try:
            return float(self._dataset.score_answer(said, entry=entry))
        except Exception as error:  # some tasks parse without a check
            raise UnreadableAnswer(raised(error)) from error
