"""Where prompts and rewards come from: files, Hugging Face datasets, reasoning-gym
(https://github.com/open-thought/reasoning-gym), and the `math` reward.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, install_extra
from asyncrl.messages.records import Prompt
from asyncrl.tasks.task import Item, Rows

Read = list[tuple[str, Mapping[str, Any]]]
"""Rows of one file, each with what errors call its place."""


def read_files(paths: Sequence[str], settings: Mapping[str, Any]) -> Rows:
    """The rows of all files, in order. Raises ConfigError for a file that is missing, empty, broken or of
    another kind, and for any settings.
    """
    if settings:
        raise ConfigError(
            f"task.args={settings} with task.files",
            rule="files have no settings",
            way_out="remove task.args.",
        )
    rows: list[Mapping[str, Any]] = []
    places: list[str] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise ConfigError(
                f"task.files: {path} is not a file",
                rule=f"paths are relative to the working directory ({Path.cwd()})",
                way_out="correct the path.",
            )
        reader = _READERS.get(path.suffix)
        if reader is None:
            raise ConfigError(
                f"task.files: {path} ends in {path.suffix or 'nothing'}",
                rule="files are .jsonl or .parquet",
                way_out="convert it, e.g. with the datasets library's to_parquet().",
            )
        found = reader(path)
        if not found:
            raise ConfigError(
                f"task.files: {path} holds no rows", way_out="put one prompt a row into it, or leave it out."
            )
        rows += (row for _, row in found)
        places += (place for place, _ in found)
    return Rows(rows, places.__getitem__)


def _read_jsonl(path: Path) -> Read:
    found: Read = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise _not_a_row(f"{place} is not JSON: {error}: {line[:80]!r}") from error
            if not isinstance(row, dict):
                raise _not_a_row(f"{place} is {type(row).__name__}, not an object")
            found.append((place, row))
    return found


def _not_a_row(what: str) -> ConfigError:
    return ConfigError(
        what,
        rule="a .jsonl file has one JSON object a line",
        way_out='correct that line; write it like {"prompt": "2+2?", "answer": "4"}.',
    )


def _read_parquet(path: Path) -> Read:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{path} is not a parquet file: {error}", way_out="write it again, or give a .jsonl file."
        ) from error
    return [(f"{path} row {number}", row) for number, row in enumerate(table.to_pylist())]


_READERS = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}


def read_dataset(name: str, split: str, settings: Mapping[str, Any]) -> Rows:
    """The rows of one split of a hub id or a folder; `settings` go to `datasets.load_dataset` as they are
    (`name` of a subset, `revision`, ...).

    A folder may be one that `save_to_disk` wrote, or one with data files. Raises ConfigError if it cannot be
    read.
    """
    import datasets

    shown = f"task.dataset={name}, split {split}"
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            found: Any = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, split=split, **settings)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{shown} cannot be loaded: {type(error).__name__}: {error}",
            way_out="check the hub id or folder, task.split, the subset (task.args: {name: ...}) and the "
            "network.",
        ) from error
    if isinstance(found, Mapping):
        if split not in found:
            raise ConfigError(
                f"{shown}: there is no such split",
                rule=f"it has {', '.join(found)}",
                way_out="set task.split to one of them.",
            )
        found = found[split]
    if len(found) == 0:
        raise ConfigError(f"{shown} holds no rows", way_out="set task.split to one that has some.")
    return Rows(found, lambda index: f"{shown}, row {index}")


class GymTask:
    """The reasoning-gym task `name` with `size` prompts; scored by that task's own score_answer.

    What is scored is what stands in the last <answer> tags (by the library's own extraction), or the whole
    completion where there are none. Many tasks give part of the reward to an answer with words around it, as
    that library has it.
    """

    def __init__(self, name: str, *, size: int, seed: int, settings: Mapping[str, Any]) -> None:
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
            from reasoning_gym.utils import extract_answer
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"task.reasoning_gym={name}: the package {error.name} is not installed",
                way_out=install_extra("harness"),
            ) from error
        if name not in DATASETS:
            close = difflib.get_close_matches(name, DATASETS, n=3)
            raise ConfigError(
                f"task.reasoning_gym={name}: reasoning-gym has no such task",
                rule=f"it has {len(DATASETS)} tasks",
                way_out=f"did you mean {' or '.join(close)}?"
                if close
                else f"the names begin with {', '.join(sorted(DATASETS)[:5])}, ...",
            )
        try:
            self._dataset = create_dataset(name, size=size, seed=seed, **settings)
        except (TypeError, ValueError, AssertionError) as error:
            known = [
                field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("size", "seed")
            ]
            raise ConfigError(
                f"task.args={dict(settings)} do not suit reasoning-gym's {name}: {error}",
                rule=f"its settings are {', '.join(known)}",
                way_out="correct task.args.",
            ) from error
        self._name, self._extract = name, extract_answer

    def __repr__(self) -> str:
        return f"<GymTask {self._name}, {len(self)} prompts>"

    def __len__(self) -> int:
        return len(self._dataset)

    def prompt(self, index: int) -> Item:
        """Question of entry `index`; its answer is {"answer", "metadata"}, for the metadata of many tasks
        hold the answer too.
        """
        entry = self._dataset[index]
        return Item(entry["question"], answer={"answer": entry["answer"], "metadata": entry["metadata"]})

    def score(self, prompt: Prompt, completion: str) -> float:
        """The library's own score of the answer, 0 to 1."""
        answer = self._extract(completion)
        entry = {"question": prompt.messages[-1]["content"], **prompt.answer}
        return float(
            self._dataset.score_answer(completion.strip() if answer is None else answer, entry=entry)
        )


# The `math` reward: is the completion's final answer the reference answer, as mathematics? (math-verify
# decides.)
#
# https://github.com/huggingface/Math-Verify. Its own time limits are signals, which work in the main thread
# alone, so they are
# off and the scorer's limit counts. A model may write 9^(9^9), whose evaluation would hold the interpreter
# for hours: that is
# why `math` runs in processes unless task.reward_pool says otherwise.


DELIMITERS = ("$", "\\boxed", "\\[", "\\(")


def math_reward(prompt: Prompt, completion: str, answer: Any) -> float:
    """1.0 if the completion's answer equals `answer` (a number, expression or LaTeX), else 0.0.

    Raises ValueError if `answer` itself is missing or no mathematics: no completion could be scored fairly.
    """
    from math_verify import parse, verify

    gold = _gold(str(answer)) if answer is not None else ()
    if not gold:
        raise ValueError(
            f"the reference answer {answer!r} is not mathematics that math-verify can read; correct that row"
        )
    return float(verify(list(gold), parse(completion, parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    """The reference answer, parsed: what stands after ####, if that is there (as in GSM8K), else all of it.

    Bare LaTeX is put into dollars, without which math-verify sees the first number in it alone; a sentence is
    not.
    """
    from math_verify import parse

    # Warns once that the time limits are off; they are off on purpose (see above).
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = answer.rpartition("####")[2].strip()
    is_sentence = "\\" not in answer and re.search(r"\b[A-Za-z]{2,}\b", answer) is not None
    readings = [answer, f"${answer}$"] if is_sentence else [f"${answer}$", answer]
    for text in [answer] if any(mark in answer for mark in DELIMITERS) else readings:
        found = parse(text, parsing_timeout=None)
        if any(
            not isinstance(reading, str) for reading in found
        ):  # a text is what math-verify gives back unparsed
            return tuple(found)
    return ()
