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
def test_backup_of_a_live_run_is_whole(tmp_path: Path) -> None:
    run_dir, backup = tmp_path / "run", tmp_path / "backup"
    (run_dir / "checkpoints/step_9").mkdir(parents=True)
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        journal.execute("PRAGMA journal_mode=WAL")
        journal.execute("CREATE TABLE groups (id)")
        journal.execute("INSERT INTO groups VALUES (7)")
        journal.commit()  # in the -wal file
        script = ROOT / "examples/backup.sh"
        subprocess.run([script, run_dir, backup], check=True)
    assert (backup.stat().st_mode & 0o777) == 0o700
    assert (backup / "checkpoints/step_9").is_dir()
    with closing(sqlite3.connect(backup / "journal.sqlite")) as copy:
        assert copy.execute("SELECT id FROM groups").fetchall() == [(7,)]
