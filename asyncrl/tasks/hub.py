"""Prompts from the Hugging Face `datasets` library: a hub id or a folder. Knows rows and columns; knows no rewards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.tasks.rows import Rows


def read_dataset(name: str, split: str, settings: Mapping[str, Any]) -> Rows:
    """The rows of one split; `settings` go to `datasets.load_dataset` as they are (`name` of a subset, `revision`, ...).

    A folder may be one that `save_to_disk` wrote, or one with data files. Raises ConfigError if it cannot be read.
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
            way_out="check the hub id or folder, task.split, the subset (task.args: {name: ...}) and the network.",
        ) from error
    if isinstance(found, Mapping):
        if split not in found:
            raise ConfigError(
                f"{shown}: there is no such split", rule=f"it has {', '.join(found)}", way_out="set task.split to one of them."
            )
        found = found[split]
    if len(found) == 0:
        raise ConfigError(f"{shown} holds no rows", way_out="set task.split to one that has some.")
    return Rows(found, lambda index: f"{shown}, row {index}")
