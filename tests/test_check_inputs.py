"""No input of `asyncrl check` ends in a traceback, and it refuses what a run refuses."""

from __future__ import annotations

import copy
import datetime
import io
import itertools
import json
import random
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from costly_cases import slow
from job_runs import CONFIG
from tiny_model import SHAPE

from asyncrl import cli
from asyncrl.base.errors import ConfigError
from asyncrl.config import RunConfig
from asyncrl.config.load import all_keys, checked
from asyncrl.config.model_config import ScratchConfig
from asyncrl.trainer.model.model_trial import try_model
from asyncrl.trainer.model.random_init import ScratchSpec, make_scratch_model

DAY = datetime.date(2024, 1, 1)
WRONG = [
    -1,
    1e400,
    10**30,
    "x",
    "",
    [],
    {},
    None,
    True,
    [[1]],
    {1: 2},
    "a:b",
    "\0",
    DAY,
    b"\xff",
]
YAML = [
    "\ta: 1",
    "a: 1\n b: 2",
    "- a",
    "3",
    "",
    "a: &a [*a]",
    "<<: 3",
    "!!python/object:os.system {}",
    "a: *x",
]
YAML += [
    "seed: 1\nseed: 2",
    "{" * 300,
    "seed: 2024-13-45",
    "1: 2",
    "? {a: 1}\n: 2",
    "---\na: 1\n---\nb: 1",
    "\0",
]
ROWS = [
    b"\xff\xfe",
    b"3",
    b"null",
    b'"ab"',
    b"[1, 2]",
    b"[" * 100_000,
    b'{"prompt": 3, "answer": 1}',
    b"{}",
    b"",
]
ROWS += [
    b'{"prompt": "\\ud800", "answer": "1"}',
    b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}",
    b"PAR1",
]
QWEN: dict[str, Any] = {**SHAPE, "vocab_size": 32, "torch_dtype": "float32"}
FOLDERS: list[Any] = [
    [],
    3,
    {},
    {"model_type": "x"},
    {"model_type": 3},
    {**QWEN, "layer_types": ["x"]},
]
FOLDERS += [{**QWEN, "num_hidden_layers": 7, "layer_types": ["full_attention"]}]
FOLDERS += [
    {**QWEN, name: wrong}
    for name in ("hidden_size", "num_attention_heads")
    for wrong in ("x", None, -1)
]
TEMPLATES = [
    "{{ 1 / 0 }}",
    "{% if %}",
    "{{ x.y.z }}",
    "{% include 'x' %}",
    "{{ raise_exception('no') }}",
    "<tool>",
]


def with_value(key: str, value: Any) -> dict[str, Any]:
    config = section = copy.deepcopy(CONFIG)
    *parts, last = key.split(".")
    for part in parts:
        section[part] = section[part] if isinstance(section.get(part), dict) else {}
        section = section[part]
    section[last] = value
    return config


def bad_inputs(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield words and a config. The message must contain one of the words."""
    chosen = random.Random(0)
    keys = sorted(all_keys())
    for key in chosen.sample(keys, 110):
        yield key.replace(".", " "), with_value(key, chosen.choice(WRONG))
    sections = {key.rpartition(".")[0] for key in keys} - {"", "eval.task", "teacher"}
    for section in (*sorted(sections - {"model"}), "model.scratch.architecture"):
        yield f"nonesuch {section}", with_value(f"{section}.nonesuch", 1)
    yield "characters", with_value("model.scratch.characters", "aba")
    yield from ((f"{folder}", text) for text in YAML)
    for number, content in enumerate(ROWS):
        for ending in ("jsonl", "parquet"):
            (folder / f"{number}.{ending}").write_bytes(content)
            task = {"files": [str(folder / f"{number}.{ending}")], "reward": "math"}
            yield f"{number}.{ending} prompt", {**CONFIG, "task": task}
    for name, of in (
        ("late", pa.timestamp("us")),
        ("zone", pa.timestamp("us", "Mars/X")),
        ("day", pa.date32()),
    ):
        pq.write_table(
            pa.table({"prompt": ["a"], "answer": pa.array([2**30], of)}),
            folder / f"{name}.parquet",
        )
        yield (
            name,
            {
                **CONFIG,
                "task": {"files": [str(folder / f"{name}.parquet")], "reward": "math"},
            },
        )
    for number, config in enumerate(FOLDERS):
        (model := folder / f"model{number}").mkdir()
        (model / "config.json").write_text(json.dumps(config))
        (model / "model.safetensors").write_bytes(b"\x02" + 7 * b"\0" + b"{}")
        yield f"model{number}", {**CONFIG, "model": {"path": str(model)}}
    for number, template in enumerate(TEMPLATES):
        (path := folder / f"{number}.jinja").write_text(template)
        yield f"{number}.jinja", with_value("model.chat_template", str(path))
    (loop := folder / "loop.jsonl").symlink_to(loop)
    for path in (str(loop), 300 * "a" + ".jsonl"):
        yield path, {**CONFIG, "task": {"files": [path], "reward": "math"}}
    for path in (300 * "a", "~nobody-here/model"):
        yield path[:80], {**CONFIG, "model": {"path": path}}
    for path in (folder, folder / "0.jsonl", Path("/dev/null")):
        yield f"{path}", with_value("model.chat_template", str(path / "x"))
        yield f"{path}", {**CONFIG, "model": {"path": str(path)}}


@pytest.mark.parametrize("every", [slow(1), 4])
def test_check_answers_200_bad_inputs_without_a_traceback(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    codes = list[Any]()
    faults = list[tuple[str, str]]()
    for words, config in itertools.islice(bad_inputs(tmp_path), 0, None, every):
        path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        monkeypatch.setattr(sys, "argv", ["asyncrl", "check", str(path)])
        with (
            pytest.raises(SystemExit) as ended,
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()) as err,
        ):
            cli.main()
        codes.append(ended.value.code)
        said = err.getvalue()
        is_named = "Way out: " in said and any(word in said for word in words.split())
        if (
            ended.value.code not in (0, 2)
            or "Traceback" in said
            or (ended.value.code == 2 and not is_named)
        ):
            faults.append((words, said))
    assert not faults
    assert every * len(codes) >= 200
    assert every * codes.count(2) > 190


def refuses(call: Any, *arguments: Any) -> bool:
    try:
        call(*arguments)
    except ConfigError:
        return True
    return False


def test_check_and_run_refuse_the_same_architectures(tmp_path: Path) -> None:
    verdicts = list[bool]()
    for key in (*SHAPE, "hidden_act", "rope_parameters", "layer_types", "hiden_size"):
        for value in (-1, 0, 3, 2.5, "x", None, [], {}, ["full_attention"]):
            scratch = {"characters": "ab", "architecture": {**SHAPE, key: value}}
            config = checked(RunConfig, {**CONFIG, "model": {"scratch": scratch}})
            spec = ScratchSpec(
                out=tmp_path / "model",
                seed=0,
                scratch=ScratchConfig.model_validate(scratch),
            )
            verdicts.append(refuses(try_model, config, tmp_path))
            assert verdicts[-1] == refuses(make_scratch_model, spec), (key, value)
    assert {*verdicts} == {True, False}
