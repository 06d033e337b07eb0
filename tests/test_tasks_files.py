"""Rows from JSONL, parquet and the datasets library become prompts; what cannot is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.config import TaskConfig
from asyncrl.tasks import Item, build_task
from asyncrl.tasks.sources import DataPin

ROWS = [{"prompt": "2+2?", "answer": "4", "level": 1}, {"prompt": "3+3?", "answer": "6", "level": 2}]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_of(*files: str, **settings: Any) -> Any:
    return build_task(TaskConfig(files=list(files), reward="math", **settings), seed=0)


def test_jsonl_and_parquet_rows_become_the_same_prompts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?", "name": None}]
    for rows, expected in (
        (ROWS, Item("2+2?", answer="4", info={"level": 1})),
        ([{"prompt": chat, "answer": "1"}], Item(chat, answer="1")),
    ):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        assert task_of(str(tmp_path / "a.parquet")).prompt(0).answer == expected.answer
        assert task_of(write_jsonl(tmp_path / "a.jsonl", rows)).prompt(0) == expected


WAY_OUT = r"(.|\n)*Way out"
QUESTION = b'{"question": "2+2?", "answer": "4"}'
TORN = b'{"prompt": "x", "answer": "1"}\n\n{"prompt": "y", "ans\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", QUESTION, "line 1 has no column prompt; its columns are question, answer"),
        ("a.jsonl", TORN, "a.jsonl cannot be read: line 3 is no JSON object"),
        ("a.rows", QUESTION, "a.rows is not a file with rows"),
        ("a.parquet", b"not at all", "a.parquet cannot be read: .*not a parquet file"),
    ],
)
def test_file_without_rows_is_refused_with_the_place(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        task_of(str(tmp_path / name))


BAD_MESSAGE = {"role": "user", "content": 3}


@pytest.mark.parametrize("prompt", [7, "", [], [{"role": "x"}], [BAD_MESSAGE]])
def test_prompt_without_text_is_named_by_its_place(tmp_path: Path, prompt: object) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], {"prompt": prompt, "answer": "1"}])
    with pytest.raises(ConfigError, match=f"a.jsonl line 2, column prompt is no prompt{WAY_OUT}"):
        task_of(file)


def test_folder_is_read_as_a_dataset(tmp_path: Path) -> None:
    def dataset_task(**settings: Any) -> Any:
        args = {"cache_dir": str(tmp_path / "cache")}
        config = TaskConfig(dataset=str(tmp_path / "data"), reward="math", args=args, **settings)
        return build_task(config, seed=0)

    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    task = dataset_task()
    assert [task.prompt(i).answer for i in range(len(task))] == ["4", "6"]
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    saved = build_task(TaskConfig(dataset=str(tmp_path / "saved"), reward="math"), seed=0)
    assert [saved.prompt(i).answer for i in range(len(saved))] == ["4", "6"]
    with pytest.raises(ConfigError, match=r"row 0 has no column q(.|\n)*prompt, answer, level"):
        dataset_task(prompt_column="q")
    with pytest.raises(ConfigError, match=r"split test cannot be loaded(.|\n)*task.split"):
        dataset_task(split="test")


def test_data_are_known_by_a_digest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    known = task_of(path).digest
    assert task_of(write_jsonl(tmp_path / "copy.jsonl", ROWS), digest=known).digest == known
    others = [[ROWS[0], {**ROWS[1], "level": 3}], ROWS[:1], [ROWS[1], ROWS[0]]]
    for rows in others:
        write_jsonl(tmp_path / "rows.jsonl", rows)
        with pytest.raises(ConfigError, match=f"task.digest={known}, and the data have"):
            task_of(path, digest=known)


def test_run_refuses_other_data_and_names_the_task(tmp_path: Path) -> None:
    DataPin(tmp_path, {"sums": "11"}).write()
    DataPin(tmp_path, {"sums": "11", "words": "22"})
    with pytest.raises(ConfigError, match=r"task.sums have changed(.|\n)*--allow-change task.digest"):
        DataPin(tmp_path, {"sums": "33"})
    DataPin(tmp_path, {"sums": "33"}, is_free=True)
