"""The process of checkpoint.callback: `python -m asyncrl.job.checkpoint_callback RUN_DIR
VERSION` exports a checkpoint, and calls the function with the export.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.base.http import fail
from asyncrl.base.user_code import load_function, raised
from asyncrl.job.run_export import export_run
from asyncrl.observe.run_dir import read_config


def load_callback(spec: str) -> Callable[..., Any]:
    return load_function(
        spec,
        "checkpoint.callback",
        usage="callback(folder, policy_version)",
        arguments=(None, None),
    )


def main(run_dir: Path, version: int) -> None:
    # The next start of the run removes the folder if this process is killed.
    made = run_dir / "checkpoints" / f".step_{version}.export"
    model = made / "model"
    try:
        config = read_config(run_dir)
        function = load_callback(config.checkpoint.callback or "")
        for role in config.trainer.roles or (None,):
            folder = model if role is None else model / role
            folder.parent.mkdir(parents=True, exist_ok=True)
            export_run(run_dir, folder, step=str(version), role=role, is_inside=True)
        function(model, version)
    except BaseException as error:  # user code may raise anything
        fail(raised(error))
    finally:
        shutil.rmtree(made, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
