"""The wheel holds what it should, under the names it should."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_installs_asyncrl_and_asyncrl_servers_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: a build writes beside the sources
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(command, check=True, timeout=240)
    (wheel,) = tmp_path.glob("asyncrl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"asyncrl", "asyncrl_servers"}
    assert {"asyncrl/py.typed", "asyncrl_servers/py.typed", "asyncrl_servers/embedded/__main__.py"} <= set(
        names
    )
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_create_task_stands_in_the_owners_of_tasks_alone() -> None:
    """Every task has an owner: the one TaskGroup of a run, of a worker, of `asyncrl serve` (tests and the
    virtual clock's loop apart).
    """
    owners = [ROOT / "asyncrl" / name for name in ("run/life.py", "agents/worker.py")]
    for path in (ROOT / "asyncrl").rglob("*.py"):
        if path in owners or path.parent.name == "testing":
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        found = [
            node.lineno
            for node in calls
            if isinstance(node.func, ast.Attribute) and node.func.attr == "create_task"
        ]
        assert not found, (
            f"{path}:{found}: create_task outside run/life.py and agents/worker.py; take `spawn`"
        )


def test_files_and_folders_stay_small_enough_to_be_found_by_their_names() -> None:
    files = [path for folder in ("asyncrl", "servers") for path in (ROOT / folder).rglob("*.py")]
    sizes = {path: len(path.read_text().splitlines()) for path in files}
    assert max(sizes.values()) <= 400, max(sizes, key=lambda path: sizes[path])
    assert len(files) <= 216, "merge files that have one user before a new one is made"
    per_folder = Counter(path.parent for path in files)
    assert max(per_folder.values()) <= 16, per_folder.most_common(1)
    modules = Counter(path.name for path in files if not path.name.startswith("__"))
    top_level = [node for path in files for node in ast.parse(path.read_text()).body]
    classes = Counter(node.name for node in top_level if isinstance(node, ast.ClassDef))
    assert [name for name, count in (modules + classes).items() if count > 1] == [], "no name stands twice"
