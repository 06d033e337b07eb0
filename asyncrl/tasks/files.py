"""Prompts from JSONL and parquet files. Knows rows and columns; knows no rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.tasks.rows import Rows


def read_files(paths: Sequence[str]) -> Rows:
    """The rows of all files, in order. Raises ConfigError for a file that is missing, empty, broken or of another kind."""
    rows: list[Mapping[str, Any]] = []
    places: list[str] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise ConfigError(
                f"task.files: {path} is not a file",
                rule=f"paths are relative to the working directory ({Path.cwd()})",
                way_out="correct the path.",
            )
        reader = {".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}.get(path.suffix)
        if reader is None:
            raise ConfigError(
                f"task.files: {path} ends in {path.suffix or 'nothing'}",
                rule="files are .jsonl or .parquet",
                way_out="convert it, e.g. with the datasets library's to_parquet().",
            )
        found = reader(path)
        if not found:
            raise ConfigError(f"task.files: {path} holds no rows", way_out="put one prompt a row into it, or leave it out.")
        rows += (row for _, row in found)
        places += (place for place, _ in found)
    return Rows(rows, places.__getitem__)


def _read_jsonl(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{place} is not JSON: {error}: {line[:80]!r}",
                    rule="a .jsonl file has one JSON object a line",
                    way_out="correct that line.",
                ) from error
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{place} is {type(row).__name__}, not an object",
                    rule="a .jsonl file has one JSON object a line",
                    way_out='write it like {"prompt": "2+2?", "answer": "4"}.',
                )
            found.append((place, row))
    return found


def _read_parquet(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a parquet file: {error}", way_out="write it again, or give a .jsonl file.") from error
    return [(f"{path} row {number}", row) for number, row in enumerate(table.to_pylist())]
