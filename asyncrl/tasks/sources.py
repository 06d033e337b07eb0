"""Prompts from files, Hugging Face datasets, reasoning-gym (https://github.com/open-thought/reasoning-gym)
and verifiers environments, and the `math` reward.
"""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from asyncrl.base.errors import ConfigError, install_extra
from asyncrl.messages.records import Prompt
from asyncrl.messages.work import VERIFIERS_KEY
from asyncrl.tasks.pinned_data import digest_of_file, digest_of_rows
from asyncrl.tasks.task import Item, UserCodeFailed, no_reward, user_code

Rows = tuple[Sequence[Mapping[str, Any]], Callable[[int], str], Mapping[str, str]]
"""(rows, name of a row in errors, digests by file)."""
ROW = TypeAdapter(dict[str, Any])


def read_files(paths: Sequence[str], settings: Mapping[str, Any]) -> Rows:
    if settings:
        raise ConfigError(f"task.args={settings}, and files have no settings", way_out="remove task.args.")
    rows: list[Mapping[str, Any]] = []
    places: list[str] = []
    digests: dict[str, str] = {}
    for path in map(Path, paths):
        reader = READERS.get(path.suffix)
        if reader is None or not path.is_file():
            what = f"task.files: {path} is not a file with rows ({', '.join(READERS)}) in {Path.cwd()}"
            raise ConfigError(what, way_out="correct the path, or convert it to parquet.")
        digests[str(path)] = digest_of_file(path)
        found = reader(path)
        if not found:
            raise ConfigError(f"task.files: {path} holds no rows", way_out="fill it, or leave it out.")
        rows += found.values()
        places += found
    return rows, places.__getitem__, digests


def _read_jsonl(path: Path) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            try:
                found[place] = ROW.validate_json(line)
            except ValidationError as error:
                what = f"{place} is not JSON, or no object: {error.errors()[0]['msg']}: {line[:80]!r}"
                way_out = 'write an object a line, like {"prompt": "2+2?", "answer": "4"}.'
                raise ConfigError(what, way_out=way_out) from error
    return found


def _read_parquet(path: Path) -> dict[str, Mapping[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a parquet file: {error}", way_out="write it again.") from error
    return {f"{path} row {number}": row for number, row in enumerate(table.to_pylist())}


READERS = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}


def read_dataset(name: str, split: str, settings: Mapping[str, Any]) -> Rows:
    """`settings` go to `datasets.load_dataset`. A folder may come from `save_to_disk` or contain data files.
    Raises ConfigError.
    """
    import datasets

    shown = f"task.dataset={name}, split {split}"
    try:
        if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found: Any = datasets.load_from_disk(name)
            if isinstance(found, Mapping):
                if split not in found:
                    raise ValueError(f"its splits are {', '.join(found)}")
                found = found[split]
        else:
            found = datasets.load_dataset(name, split=split, **settings)
    except Exception as error:  # file formats and the hub raise various errors
        what = f"{shown} cannot be loaded: {type(error).__name__}: {error}"
        way_out = "check hub id or folder, task.split, subset (task.args: {name: ...}) and network."
        raise ConfigError(what, way_out=way_out) from error
    if len(found) == 0:
        raise ConfigError(f"{shown} holds no rows", way_out="set another task.split.")
    digests = {f"{name}, split {split}": digest_of_rows(found)}
    return found, lambda index: f"{shown}, row {index}", digests


class GymTask:
    """Score the last <answer> tags with the library's score_answer, or the whole completion without tags."""

    def __init__(self, name: str, *, size: int, seed: int, settings: Mapping[str, Any]) -> None:
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
            from reasoning_gym.utils import extract_answer
        except ModuleNotFoundError as error:
            what = f"task.reasoning_gym={name}: the package {error.name} is not installed"
            raise ConfigError(what, way_out=install_extra("harness")) from error
        if name not in DATASETS:
            close = difflib.get_close_matches(name, DATASETS, n=3)
            way_out = f"did you mean {' or '.join(close or sorted(DATASETS))}?"
            raise ConfigError(f"task.reasoning_gym={name}: reasoning-gym has no such task", way_out=way_out)
        try:
            self._dataset = create_dataset(name, size=size, seed=seed, **settings)
        except (TypeError, ValueError, AssertionError) as error:
            known = ", ".join(sorted(set(DATASETS[name][1].__dataclass_fields__) - {"size", "seed"}))
            what = f"task.args={dict(settings)} do not suit reasoning-gym's {name}: {error}"
            raise ConfigError(what, way_out=f"correct task.args; {name} has {known}.") from error
        self._name = name
        self._extract = extract_answer

    def __repr__(self) -> str:
        return f"<GymTask {self._name}, {len(self)} prompts>"

    def __len__(self) -> int:
        return len(self._dataset)

    def prompt(self, index: int) -> Item:
        """Metadata go to `answer`, which they often reveal."""
        entry = self._dataset[index]
        return Item(entry["question"], answer={"answer": entry["answer"], "metadata": entry["metadata"]})

    def score(self, prompt: Prompt, completion: str) -> float:
        answer = self._extract(completion)
        entry = {"question": prompt.messages[-1]["content"], **prompt.answer}
        said = completion.strip() if answer is None else answer
        return float(self._dataset.score_answer(said, entry=entry))


class VerifiersTask:
    """Tasks of a verifiers environment (https://github.com/PrimeIntellect-ai/verifiers), the first `size` of
    an endless taskset.

    All are read here, so that a bad task ends the run before it starts.
    """

    def __init__(self, taskset: Any, *, size: int) -> None:
        self._name = type(taskset).__name__
        found: list[Any] = []
        try:
            with user_code():
                for task in itertools.islice(taskset, None if taskset.bounded else size):
                    found.append(task.data)
        except UserCodeFailed as failure:
            what = f"task {len(found)} of {self._name}: making it {failure}"
            way_out = "correct it, or generator.args.taskset."
            raise ConfigError(what, way_out=way_out) from failure
        self._items = [self._item(data, index) for index, data in enumerate(found)]

    def __repr__(self) -> str:
        return f"<VerifiersTask {self._name}, {len(self)} prompts>"

    def __len__(self) -> int:
        return len(self._items)

    def prompt(self, index: int) -> Item:
        return self._items[index]

    def score(self, prompt: Prompt, completion: str) -> float:
        raise no_reward(prompt)

    def _item(self, data: Any, index: int) -> Item:
        try:
            row = data.model_dump(mode="json")
            json.dumps(row, allow_nan=False)
        except ValueError as error:
            what = f"{self._name}: task {index} has a value that is not JSON ({error})"
            raise ConfigError(what, way_out="correct its data.") from error
        prompt = row.get("prompt") or []
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if data.system_prompt is not None:
            prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
        messages = [{"role": each["role"], "content": _shown(each.get("content"))} for each in prompt]
        opening = {"role": "user", "content": "(the environment opens the conversation)"}
        return Item(messages or [opening], info={VERIFIERS_KEY: row})


def _shown(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


# math-verify (https://github.com/huggingface/Math-Verify) limits time by signals, which need the main thread,
# so the scorer's limit applies. Evaluating 9^(9^9) would hold the interpreter for hours, so `math` runs in
# processes by default.


DELIMITERS = ("$", "\\boxed", "\\[", "\\(")


def math_reward(prompt: Prompt, completion: str, answer: Any) -> float:
    """Return 1.0 if the completion's answer equals `answer` (a number, expression or LaTeX), else 0.0. Raises
    ValueError.
    """
    from math_verify import parse, verify

    gold = _gold(str(answer)) if answer is not None else ()
    if not gold:
        raise ValueError(f"math-verify cannot read the reference answer {answer!r}; correct that row")
    return float(verify(list(gold), parse(completion, parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    """Parse the reference answer, after #### if any (GSM8K).

    Without dollars, math-verify sees only the first number of LaTeX.
    """
    from math_verify import parse

    # It warns that time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = answer.rpartition("####")[2].strip()
    is_sentence = "\\" not in answer and re.search(r"\b[A-Za-z]{2,}\b", answer) is not None
    readings = [answer, f"${answer}$"] if is_sentence else [f"${answer}$", answer]
    for text in [answer] if any(mark in answer for mark in DELIMITERS) else readings:
        found = parse(text, parsing_timeout=None)
        # unparsed text is a str
        if any(not isinstance(reading, str) for reading in found):
            return tuple(found)
    return ()
