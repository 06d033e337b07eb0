"""Rows from JSONL, parquet and the datasets library become prompts; what cannot is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.config import TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.tasks import Item, build_task

ROWS = [{"prompt": "2+2?", "answer": "4", "level": 1}, {"prompt": "3+3?", "answer": "6", "level": 2}]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_of(*files: str, **settings: Any) -> Any:
    return build_task(TaskConfig(files=list(files), reward="math", **settings), seed=0)


def test_a_jsonl_row_becomes_prompt_answer_and_info(tmp_path: Path) -> None:
    task = task_of(write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert len(task) == 2
    assert task.prompt(1) == Item("3+3?", answer="6", info={"level": 2})


def test_a_parquet_file_gives_the_same_items_as_the_jsonl_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?", "name": None}]
    for number, rows in enumerate((ROWS, [{"prompt": chat, "answer": "1"}])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{number}.parquet")
        parquet = task_of(str(tmp_path / f"{number}.parquet"))
        jsonl = task_of(write_jsonl(tmp_path / f"{number}.jsonl", rows))
        assert [parquet.prompt(i).answer for i in range(len(rows))] == [
            jsonl.prompt(i).answer for i in range(len(rows))
        ]


def test_a_missing_column_names_the_columns_that_exist(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"question": "2+2?", "answer": "4"}])
    with pytest.raises(ConfigError, match=r"line 1 has no column prompt; its columns are question, answer"):
        task_of(file)
    with pytest.raises(ConfigError, match=r"no column gold(.|\n)*Way out: set task.prompt_column"):
        task_of(file, prompt_column="question", answer_column="gold")


def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "answer": "1"}\n\n{"prompt": "y", "ans\n')
    with pytest.raises(ConfigError, match=r"a.jsonl line 3 is not JSON(.|\n)*Way out"):
        task_of(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    "prompt",
    [
        7,
        "",
        [],
        ["hi"],
        [{"role": "user"}],
        [{"role": "x", "content": "a"}],
        [{"role": "user", "content": 3}],
    ],
)
def test_a_prompt_that_is_no_text_is_named_by_its_place(tmp_path: Path, prompt: object) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], {"prompt": prompt, "answer": "1"}])
    with pytest.raises(ConfigError, match=r"a.jsonl line 2, column prompt is no prompt(.|\n)*Way out"):
        task_of(file)


def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.jsonl is not a file"):
        task_of(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "a.csv").write_text("prompt\nx\n")
    with pytest.raises(ConfigError, match=r"a.csv is not a file with rows .\.jsonl"):
        task_of(str(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("not at all")
    with pytest.raises(ConfigError, match="a.parquet is not a parquet file"):
        task_of(str(tmp_path / "a.parquet"))


def dataset_task(folder: Path, cache: Path, **settings: Any) -> Any:
    config = TaskConfig(dataset=str(folder), reward="math", args={"cache_dir": str(cache)}, **settings)
    return build_task(config, seed=0)


def test_a_folder_of_data_files_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    task = dataset_task(tmp_path / "data", tmp_path / "cache")
    assert [task.prompt(i).answer for i in range(len(task))] == ["4", "6"]
    with pytest.raises(ConfigError, match=r"row 0 has no column q(.|\n)*prompt, answer, level"):
        dataset_task(tmp_path / "data", tmp_path / "cache", prompt_column="q")
    with pytest.raises(ConfigError, match=r"split test cannot be loaded(.|\n)*task.split"):
        dataset_task(tmp_path / "data", tmp_path / "cache", split="test")


def test_a_saved_dataset_is_read_with_and_without_splits(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"easy": rows}).save_to_disk(tmp_path / "splits")
    assert len(dataset_task(tmp_path / "plain", tmp_path)) == 2
    assert len(dataset_task(tmp_path / "splits", tmp_path, split="easy")) == 2
    with pytest.raises(ConfigError, match="its splits are easy"):
        dataset_task(tmp_path / "splits", tmp_path)
