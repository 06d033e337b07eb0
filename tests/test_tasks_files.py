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
from asyncrl.tasks.sources import DataPin, digest_of_rows, whole_digest

ROWS = [{"prompt": "2+2?", "answer": "4", "level": 1}, {"prompt": "3+3?", "answer": "6", "level": 2}]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_of(*files: str, **settings: Any) -> Any:
    return build_task(TaskConfig(files=list(files), reward="math", **settings), seed=0)


def test_jsonl_and_parquet_rows_become_the_same_prompts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?", "name": None}]
    for number, rows in enumerate((ROWS, [{"prompt": chat, "answer": "1"}])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{number}.parquet")
        parquet = task_of(str(tmp_path / f"{number}.parquet"))
        jsonl = task_of(write_jsonl(tmp_path / f"{number}.jsonl", rows))
        assert [parquet.prompt(i).answer for i in range(len(rows))] == [row["answer"] for row in rows]
        assert [jsonl.prompt(i).answer for i in range(len(rows))] == [row["answer"] for row in rows]
    task = task_of(write_jsonl(tmp_path / "a.jsonl", ROWS))
    assert (len(task), task.prompt(1)) == (2, Item("3+3?", answer="6", info={"level": 2}))


WAY_OUT = r"(.|\n)*Way out"
QUESTION = b'{"question": "2+2?", "answer": "4"}'
HAS_NO_COLUMN = "line 1 has no column prompt; its columns are question, answer"
TORN = b'{"prompt": "x", "answer": "1"}\n\n{"prompt": "y", "ans\n'


@pytest.mark.parametrize(
    ("name", "content", "settings", "said"),
    [
        ("a.jsonl", QUESTION, {}, HAS_NO_COLUMN),
        ("a.jsonl", TORN, {}, "a.jsonl cannot be read: line 3 is no JSON object"),
        ("nowhere.jsonl", None, {}, "nowhere.jsonl is not a file"),
        ("a.parquet", b"not at all", {}, "a.parquet cannot be read: .*not a parquet file"),
    ],
)
def test_file_without_rows_is_refused_with_the_place(
    tmp_path: Path, name: str, content: bytes | None, settings: dict[str, Any], said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        task_of(str(tmp_path / name), **settings)


BAD_MESSAGE = {"role": "user", "content": 3}


@pytest.mark.parametrize("prompt", [7, "", [], [{"role": "x"}], [BAD_MESSAGE]])
def test_prompt_without_text_is_named_by_its_place(tmp_path: Path, prompt: object) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], {"prompt": prompt, "answer": "1"}])
    with pytest.raises(ConfigError, match=f"a.jsonl line 2, column prompt is no prompt{WAY_OUT}"):
        task_of(file)


def dataset_task(folder: Path, cache: Path, **settings: Any) -> Any:
    config = TaskConfig(dataset=str(folder), reward="math", args={"cache_dir": str(cache)}, **settings)
    return build_task(config, seed=0)


def test_folder_or_saved_dataset_is_read(tmp_path: Path) -> None:
    import datasets

    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"easy": rows}).save_to_disk(tmp_path / "splits")
    for name, settings in (("data", {}), ("plain", {}), ("splits", {"split": "easy"})):
        task = dataset_task(tmp_path / name, tmp_path / "cache", **settings)
        assert [task.prompt(i).answer for i in range(len(task))] == ["4", "6"]
    for name, settings, said in (
        ("data", {"prompt_column": "q"}, r"row 0 has no column q(.|\n)*prompt, answer, level"),
        ("data", {"split": "test"}, r"split test cannot be loaded(.|\n)*task.split"),
        ("splits", {}, "its splits are easy"),
    ):
        with pytest.raises(ConfigError, match=said):
            dataset_task(tmp_path / name, tmp_path / "cache", **settings)


def test_data_are_known_by_a_digest(tmp_path: Path) -> None:
    import datasets

    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    known = whole_digest(task_of(path).digests)
    assert len(task_of(path, digest=known)) == 2
    write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], "level": 3}])
    with pytest.raises(ConfigError, match=f"task.digest={known}, and the data of .*rows.jsonl have"):
        task_of(path, digest=known)
    other = write_jsonl(tmp_path / "other.jsonl", ROWS)
    orders = ([path, other], [other, path], [path])
    assert len({whole_digest(task_of(*paths).digests) for paths in orders}) == 3

    found = [{"text": f"{n}" * n, "is": n % 2 == 0, "n": [n] * 2} for n in range(25)]
    rows = datasets.Dataset.from_list(found)
    rows.save_to_disk(tmp_path / "one")
    rows.save_to_disk(tmp_path / "many", num_shards=3)
    saved = [datasets.load_from_disk(str(tmp_path / name)) for name in ("one", "many")]
    assert len({digest_of_rows(found) for found in (rows, *saved)}) == 1
    changed = rows.map(lambda row: {"text": row["text"] + "!" * (row["n"][0] == 24)})
    others = (changed, rows.rename_column("text", "words"), rows.select(range(24)), rows.select([1, 0]))
    assert len({digest_of_rows(found) for found in (rows, *others)}) == 5


def test_run_refuses_other_data_and_names_the_task(tmp_path: Path) -> None:
    begun = {"sums": {"a.jsonl": "11", "b.jsonl": "22"}, "words": {}}
    DataPin(tmp_path, begun).write()
    DataPin(tmp_path, {"sums": {"elsewhere/a.jsonl": "11", "elsewhere/b.jsonl": "22"}})
    for now in ({"a.jsonl": "11", "b.jsonl": "33"}, {"a.jsonl": "11"}, {"b.jsonl": "22", "a.jsonl": "11"}):
        with pytest.raises(ConfigError, match=r"task.sums have changed(.|\n)*--allow-change task.digest"):
            DataPin(tmp_path, {"sums": now})
        DataPin(tmp_path, {"sums": now}, is_free=True)
