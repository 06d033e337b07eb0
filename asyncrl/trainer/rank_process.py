"""The trainer process: `python -m asyncrl.trainer.rank_process --spec FILE --fd N`. Knows how to start and
end; no steps itself.

Makes the staging directory with mode 0700, and removes it if the parent is gone. Whoever else ends the worker
removes it, or leaves it to the one that takes its place: engines may still read the last export.
With several ranks each is such a process; rank 0 removes the directory, the others only if the parent is
gone.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
from pathlib import Path

from pydantic import ValidationError

from asyncrl.http import child_arguments, die_with_parent, fail, serve
from asyncrl.trainer.spec import TrainerSpec


def main() -> None:
    """Serve until SIGTERM or the parent's end; ends with a fatal line if the spec cannot be met."""
    text, fd = child_arguments()
    try:
        spec = TrainerSpec.model_validate_json(text)
    except ValidationError as error:
        fail(
            f"the trainer's spec is wrong: {error}",
            rule="see asyncrl/trainer/spec.py",
            way_out="start it through asyncrl.",
        )

    def remove_staging() -> None:
        shutil.rmtree(spec.staging_dir, ignore_errors=True)

    def end(*_: object) -> None:
        os._exit(0)  # a step may hold the torch thread for long; nothing of it is worth waiting for

    die_with_parent(remove_staging)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    make_staging(spec.staging_dir)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from transformers.utils.logging import disable_progress_bar  # torch: only once the parent is watched

    from asyncrl.trainer.record import hold_record
    from asyncrl.trainer.service import make_service

    if spec.rank == 0:
        try:
            hold_record(spec.record_path)
        except (OSError, TimeoutError) as error:
            fail(
                f"cannot hold the record: {error}",
                rule="one trainer at a time writes it",
                way_out="end the process that holds it.",
            )
    disable_progress_bar()
    serve(make_service(spec), fd)


def make_staging(path: Path) -> None:
    """Make the folder that only this user may enter, or end the process: a folder of another user's is never
    used.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        fail(
            f"cannot make the staging folder {path}: {error}",
            way_out="free space in shared memory, or check its rights.",
        )
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        fail(
            f"the staging folder {path} belongs to user {info.st_uid}, or is no folder",
            rule="weights go into a folder of one's own alone",
        )
    path.chmod(0o700)


if __name__ == "__main__":
    main()
