"""What docs/operating.md tells an operator to do."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl import __version__

ROOT = Path(__file__).parents[1]


def test_upgrades_name_this_version() -> None:
    page = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    assert f"\n| {__version__} | " in page


@pytest.mark.skipif(not shutil.which("sqlite3"), reason="apt-get install sqlite3")
@pytest.mark.parametrize("num_pruned", [0, 1, 9])
def test_backup_of_a_live_run_is_whole(tmp_path: Path, num_pruned: int) -> None:
    run_dir, backup = tmp_path / "run", tmp_path / "backup"
    (run_dir / "checkpoints/step_9").mkdir(parents=True)
    (run_dir / "checkpoints/step_10").mkdir()
    (run_dir / "config.yaml").write_text("seed: 0\n")
    # A run prunes a checkpoint while the records are copied.
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    prunes = f"""#!/bin/sh
    echo >> {tmp_path}/calls; n=$(wc -l < {tmp_path}/calls)
    [ $n -gt {num_pruned} ] || mv {run_dir}/checkpoints/step_$((9 + n)) {run_dir}/checkpoints/step_$((10 + n))
    exec {shutil.which("sqlite3")} "$@"
    """
    (bin_dir / "sqlite3").write_text(prunes)
    (bin_dir / "sqlite3").chmod(0o755)
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        journal.execute("PRAGMA journal_mode=WAL")
        journal.execute("CREATE TABLE groups (id)")
        journal.execute("INSERT INTO groups VALUES (7)")
        journal.commit()  # in the -wal file
        done = subprocess.run(
            [ROOT / "examples/backup.sh", run_dir, backup],
            env={"PATH": f"{bin_dir}:/usr/bin:/bin"},
            check=False,
        )
    assert done.returncode == (num_pruned > 2)
    assert (backup.stat().st_mode & 0o777, (backup / "config.yaml").exists()) == (
        0o700,
        True,
    )
    with closing(sqlite3.connect(backup / "journal.sqlite")) as copy:
        assert copy.execute("SELECT id FROM groups").fetchall() == [(7,)]
    if not done.returncode:
        newest = f"step_{10 + num_pruned}"
        assert (backup / "checkpoints" / newest).is_dir()
