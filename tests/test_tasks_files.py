"""Rows from JSONL, parquet and the datasets library become prompts; what cannot is
refused with its place.
"""

from __future__ import annotations

import json
import math
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from asyncrl.base.errors import ConfigError
from asyncrl.base.user_code import load_object
from asyncrl.config import RunConfig, TaskConfig
from asyncrl.messages.records import Prompt
from asyncrl.tasks import Item, build_task
from asyncrl.tasks.rewards import reward_function
from asyncrl.tasks.sources import DataPin, record_code
from asyncrl.tasks.task import RowTask

ROWS = [
    {"prompt": "2+2?", "answer": "4", "level": 1},
    {"prompt": "3+3?", "answer": "6", "level": 2},
]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_of(*files: str, **settings: Any) -> Any:
    return build_task(TaskConfig(files=list(files), reward="math", **settings), seed=0)


def test_jsonl_and_parquet_rows_become_the_same_prompts(tmp_path: Path) -> None:
    chat = [
        {"role": "assistant", "content": "yes?", "name": None},
        {"role": "user", "content": "hi"},
    ]
    for rows, expected in (
        (ROWS, Item("2+2?", answer="4", info={"level": 1})),
        ([{"prompt": chat, "answer": "1"}], Item(chat, answer="1")),
    ):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet"
        )
        assert task_of(str(tmp_path / "a.parquet")).prompt(0).answer == expected.answer
        assert task_of(write_jsonl(tmp_path / "a.jsonl", rows)).prompt(0) == expected


WAY_OUT = r"(.|\n)*Way out"
QUESTION = b'{"question": "2+2?", "answer": "4"}'
TORN = b'{"prompt": "x", "answer": "1"}\n\n{"prompt": "y", "ans\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "a.jsonl",
            QUESTION,
            "line 1 has no column prompt; its columns are \\['question', 'answer'\\]",
        ),
        ("a.jsonl", TORN, "a.jsonl cannot be read: .*line 3 is not a JSON object"),
        (
            "a.jsonl",
            QUESTION.replace(b"question", b"prompt") + b'\n["prompt", "answer"]',
            "line 2 is not a JSON",
        ),
        (
            "a.json",
            b'[{"prompt": "x", "answer": "1"}, [["prompt", "x"]]]',
            "item 2 is not a JSON object: .*list",
        ),
        (
            "a.json",
            b'[{"prompt": "x", "answer": "1"}',
            "a.json cannot be read: .*Expecting",
        ),
        (
            "a.jsonl",
            b'{"prompt": "x", "prompt": "y", "answer": "1"}',
            "line 1 is not a JSON object: an object has the key 'prompt' twice",
        ),
        (
            "a.json",
            b'[{"prompt": "x", "answer": {"a": 1, "a": 2}}]',
            "a.json cannot be read: .*key 'a' twice",
        ),
        (
            "a.jsonl",
            b'{"prompt": [{"role": "user", "content": "2+2?"},'
            b' {"role": "assistant", "content": "4"}], "answer": "4"}',
            "line 1, column prompt ends with the assistant's message '4'",
        ),
        (
            "a.jsonl",
            b'{"prompt": "[{\\"role\\": \\"user\\"}]", "answer": "4"}',
            "line 1, column prompt is not a valid prompt",
        ),
        ("a.jsonl", QUESTION.decode().encode("utf-16-le"), "cannot be read: .*UTF-16"),
        ("a.json", b"[" * 100_000, "a.json cannot be read: RecursionError"),
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


def test_json_array_has_the_rows_of_its_lines(tmp_path: Path) -> None:
    # a list of pairs also makes a dict
    rows = [{"prompt": "p", "level": 1}, {"prompt": "q", "level": 2}]

    def digest_of(path: str) -> str:
        config = TaskConfig(
            files=[path], answer_column=None, reward="rewards_for_test:begins_with"
        )
        task: Any = build_task(config, seed=0)
        return str(task.digest)

    lines = digest_of(write_jsonl(tmp_path / "a.jsonl", rows))
    for text in (
        json.dumps(rows),
        json.dumps(rows, indent=2),
        f"\ufeff \n{json.dumps(rows)}\n",
    ):
        (tmp_path / "a.json").write_text(text)
        assert digest_of(str(tmp_path / "a.json")) == lines


def test_file_listed_twice_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match="names a file twice"):
        task_of(path, f"{tmp_path}/../{tmp_path.name}/a.jsonl")


NUMBERS = [
    7,
    -7,
    2.5,
    1e-7,
    1e22,
    10**30,
    Decimal("1E+3"),
    Decimal("0.10"),
    "7",
    "1e5",
    "-2.5E-3",
    "x #### 4",
]
OTHERS = [
    None,
    True,
    ["7"],
    [],
    {"ground_truth": "7"},
    b"7",
    math.nan,
    -math.inf,
    date(2026, 1, 1),
]


@pytest.mark.parametrize("answer", NUMBERS)
def test_math_reads_each_reference_as_its_number(answer: Any) -> None:
    number = Fraction(str(answer).rpartition("####")[2].strip())
    score = reward_function(TaskConfig(files=["x"], reward="math"))
    for shift, reward in ((0, 1.0), (1, 0.0)):
        said = number + shift
        text = (
            str(said.numerator)
            if said.denominator == 1
            else f"\\frac{{{said.numerator}}}{{{said.denominator}}}"
        )
        assert (
            score(Prompt("0/0", (), answer=answer), f"It is $\\boxed{{{text}}}$.")
            == reward
        )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        *(
            (other, "ValueError: .*neither a text nor a finite number")
            for other in OTHERS
        ),
        *(
            (blank, "the reference answer .* is empty")
            for blank in ("", " ", "2 #### ")
        ),
        (object(), "no digest"),
    ],
)
def test_value_of_a_type_that_cannot_be_used_is_refused(value: Any, words: str) -> None:
    rows = [{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": value}]
    reward = "math" if words != "no digest" else "x:y"
    with pytest.raises(ConfigError, match=f"^row 1 cannot be used: .*{words}"):
        RowTask(
            rows,
            "row {}".format,
            lambda *_: 0.0,
            TaskConfig(files=["x"], reward=reward),
        )


@pytest.mark.parametrize(
    "kind", [pyarrow.timestamp("us"), pyarrow.timestamp("us", tz="Mars/Phobos")]
)
def test_column_that_python_cannot_hold_is_refused(tmp_path: Path, kind: Any) -> None:
    table = pyarrow.table(
        {"prompt": ["p"], "answer": ["1"], "when": pyarrow.array([2**62], kind)}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet cannot be read: \S+: "):
        task_of(str(tmp_path / "a.parquet"))


BAD_MESSAGE = {"role": "user", "content": 3}


@pytest.mark.parametrize("prompt", [7, "", [], [{"role": "x"}], [BAD_MESSAGE]])
def test_prompt_without_text_is_named_by_its_place(
    tmp_path: Path, prompt: object
) -> None:
    file = write_jsonl(
        tmp_path / "a.jsonl", [ROWS[0], {"prompt": prompt, "answer": "1"}]
    )
    with pytest.raises(
        ConfigError,
        match=f"a.jsonl line 2, column prompt is not a valid prompt{WAY_OUT}",
    ):
        task_of(file)


def test_folder_is_read_as_a_dataset(tmp_path: Path) -> None:
    def dataset_task(**settings: Any) -> Any:
        args = {"cache_dir": str(tmp_path / "cache")}
        config = TaskConfig(
            dataset=str(tmp_path / "data"), reward="math", args=args, **settings
        )
        return build_task(config, seed=0)

    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    task = dataset_task()
    assert [task.prompt(i).answer for i in range(len(task))] == ["4", "6"]
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(
        tmp_path / "saved"
    )
    saved = build_task(
        TaskConfig(dataset=str(tmp_path / "saved"), reward="math"), seed=0
    )
    assert [saved.prompt(i).answer for i in range(len(saved))] == ["4", "6"]
    with pytest.raises(
        ConfigError, match=r"row 0 has no column q(.|\n)*'prompt', 'answer', 'level'"
    ):
        dataset_task(prompt_column="q")
    with pytest.raises(
        ConfigError, match=r"split test cannot be loaded(.|\n)*task.split"
    ):
        dataset_task(split="test")


def test_data_are_known_by_a_digest(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    known = task_of(path).digest
    assert task_of(write_jsonl(tmp_path / "copy.jsonl", ROWS)).digest == known
    others = [[ROWS[0], {**ROWS[1], "level": 3}], ROWS[:1], [ROWS[1], ROWS[0]]]
    for rows in others:
        assert task_of(write_jsonl(tmp_path / "rows.jsonl", rows)).digest != known


@pytest.mark.parametrize("kind", ["Image", "Audio"])
def test_digest_sees_undecoded_media(tmp_path: Path, kind: str) -> None:
    import datasets

    def digest_of(name: str, content: bytes) -> str:
        media = {"bytes": content, "path": None}
        data = datasets.Dataset.from_list(
            [{**ROWS[0], "one": media, "several": [media]}]
        )
        feature = getattr(datasets, kind)()
        shape = data.features | {"one": feature, "several": datasets.List(feature)}
        data.cast(datasets.Features(shape)).save_to_disk(tmp_path / name)
        task: Any = build_task(
            TaskConfig(dataset=str(tmp_path / name), reward="math"), seed=0
        )
        return str(task.digest)

    assert digest_of("1", b"a") == digest_of("2", b"a") != digest_of("3", b"b")


@pytest.mark.parametrize("way", ["saved", "parquet", "file"])
def test_json_columns_are_decoded_at_any_depth(tmp_path: Path, way: str) -> None:
    import datasets

    chat = [{"role": "user", "content": "q"}]
    row = {
        "prompt": chat,
        "answer": {"tests": [1, [2]]},
        "several": [[{"k": 1}], []],
        "within": {"none": None, "deep": {"x": [1]}},
        "text": "[1]",
    }
    json, many = datasets.Json(), datasets.List
    shape = {
        "prompt": many(json),
        "answer": json,
        "several": many(many(json)),
        "within": {"none": json, "deep": json},
        "text": datasets.Value("string"),
    }
    (tmp_path / "data").mkdir()
    data = datasets.Dataset.from_list([row], features=datasets.Features(shape))
    if way == "saved":
        data.save_to_disk(tmp_path / "data")
    else:
        data.to_parquet(tmp_path / "data/train.parquet")
    source: dict[str, Any] = {"files": [str(tmp_path / "data/train.parquet")]}
    if way != "file":
        args = {"cache_dir": str(tmp_path / "cache")} if way == "parquet" else {}
        source = {"dataset": str(tmp_path / "data"), "args": args}
    config = TaskConfig.model_validate(
        {**source, "reward": "rewards_for_test:begins_with"}
    )
    task = build_task(config, seed=0)
    item: Any = task.prompt(0)
    assert [*item.content] == chat
    assert {"prompt": item.content, "answer": item.answer, **item.info} == row


def test_a_saved_folder_without_the_split_is_refused_with_its_splits(
    tmp_path: Path,
) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    splits = datasets.DatasetDict({"test": rows, "validation": rows})
    splits.save_to_disk(tmp_path / "saved")
    config = TaskConfig(dataset=str(tmp_path / "saved"), reward="math")
    with pytest.raises(
        ConfigError, match=r"has the splits test, validation(.|\n)*task.split"
    ):
        build_task(config, seed=0)


def test_changed_code_is_recorded_with_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_code.py").write_text(
        "import inner_code\nfrom code_helpers import half"
    )
    (tmp_path / "inner_code").mkdir()
    (tmp_path / "inner_code/__init__.py").write_text("from inner_code.halves import *")
    (tmp_path / "inner_code/halves.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig.model_validate(
        {
            "model": {"path": "m", "chat_template": f"{tmp_path}/chat.jinja"},
            "task": {"files": ["x"], "reward": "my_code:half"},
        }
    )
    named = "code_helpers.py of my_code:half"
    steps = [
        (1, "code_helpers.py"),
        (8, "code_helpers.py"),
        (9, "unrelated.py"),
        (11, "chat.jinja"),
        (12, "inner_code/halves.py"),
    ]
    template = f"chat.jinja of {tmp_path}/chat.jinja"
    expected = [[], [named], [], [template], ["inner_code/halves.py of my_code:half"]]
    for (step, file), changed in zip(steps, expected, strict=True):
        (tmp_path / file).write_text(f"half = {step}")
        load_object("my_code:half", "task.reward")
        assert record_code(tmp_path, config, step) == changed
    records = json.loads((tmp_path / "code.json").read_text())
    assert [(each["step"], each["changed"]) for each in records] == [
        (1, []),
        (8, expected[1]),
        (11, expected[3]),
        (12, expected[4]),
    ]


def test_run_refuses_other_data_and_names_the_task(tmp_path: Path) -> None:
    DataPin(tmp_path, {"sums": "11"}).write()
    DataPin(tmp_path, {"sums": "11", "words": "22"})
    with pytest.raises(
        ConfigError, match=r"task.sums have changed(.|\n)*--allow-change task.digest"
    ):
        DataPin(tmp_path, {"sums": "33"})
    DataPin(tmp_path, {"sums": "33"}, is_free=True)
