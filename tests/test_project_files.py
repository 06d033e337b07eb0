"""Pages and files around the code name functions, files and commands that exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import conftest
import pytest
import yaml

from asyncrl import __version__

ROOT = Path(__file__).parents[1]
ROOTS = (ROOT, ROOT / "asyncrl", ROOT / "servers/asyncrl_servers")


def text_of(name: str) -> str:
    """Return the text of a file, "" if it does not exist."""
    return next(
        (path.read_text() for root in ROOTS if (path := root / name).is_file()), ""
    )


def test_architecture_names_functions_that_exist() -> None:
    stops = re.findall(
        r"`([\w.]+)` \(`([\w/]+\.py)`\)", text_of("docs/architecture.md")
    )
    assert len(stops) > 40
    defined = r"^ *(class|def|async def) {0}\b|^    {0} = "
    for name, file in stops:
        for part in name.split("."):
            assert re.search(defined.format(part), text_of(file), re.M), (
                f"{file} has no {name}"
            )


def test_contributing_names_files_that_exist() -> None:
    page = text_of("CONTRIBUTING.md")
    files = re.findall(r"`((?:\w+/)+\w+\.py)`", page)
    assert len(files) > 30
    assert [file for file in files if not text_of(file)] == []
    assert [line for line in page.splitlines() if len(line) > 120] == []


def test_files_of_the_host_name_version_and_commands() -> None:
    assert "- run: .ci/run\n" in text_of(".github/workflows/ci.yml")
    assert "`asyncrl report RUN_DIR`" in text_of(".github/ISSUE_TEMPLATE/bug.yml")
    version, date = re.findall(r"## \[(\d.*)\] - (.*)", text_of("CHANGELOG.md"))[0]
    is_released = ".dev" not in __version__
    assert __version__ == version if is_released else __version__ > version
    assert f"version: {version}\ndate-released: {date}\n" in text_of("CITATION.cff")
    for entry in re.findall("entry: .venv/bin(.*)", text_of(".pre-commit-config.yaml")):
        assert f"$(BIN){entry}" in text_of("Makefile")


JOBS = {
    f"{path.stem} {name}": job
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
    for name, job in yaml.safe_load(path.read_text())["jobs"].items()
}
PUBLISHING = {
    "release publish-wheel": "pypa/gh-action-pypi-publish",
    "release publish-image": "docker/build-push-action",
    "release publish-site": "actions/deploy-pages",
}


@pytest.mark.parametrize("name", JOBS)
def test_workflows_run_commands_and_publish_files_that_exist(name: str) -> None:
    job = JOBS[name]
    steps = job.get("steps", [])
    for line in [line for step in steps for line in step.get("run", "").splitlines()]:
        program, *words = shlex.split(line)
        if program == "make":
            subprocess.run(["make", "-n", *words], cwd=ROOT, check=True)
        elif program != "sudo":
            assert os.access(ROOT / program, os.X_OK), line
    if "uses" in job:
        assert (ROOT / job["uses"]).is_file()
    targets = re.findall(r"^FROM \w+ AS (\w+)$", text_of("Dockerfile"), re.M)
    assert set(job.get("strategy", {}).get("matrix", {}).get("target", [])) <= {
        *targets
    }
    # Only jobs that publish may change anything, and they wait for the tests.
    can_publish = "permissions" in job
    assert can_publish == (name in PUBLISHING)
    if can_publish:
        assert "ci" in job["needs"]
        actions = [step["uses"].split("@")[0] for step in steps]
        assert PUBLISHING[name] in actions


def test_release_hands_over_what_it_built_and_names_no_registry() -> None:
    text = text_of(".github/workflows/release.yml")
    assert re.findall(r"[\w-]+\.(?:io|com|org|dev)\b", text) == []
    assert re.findall(r"^ +path: (.*)$", text, re.M) == [
        "dist/*.whl",  # uploaded, and downloaded for PyPI
        "build/site",
        "dist",
    ]
    assert "site_dir: build/site\n" in text_of("mkdocs.yml")


def test_wheel_of_another_version_than_the_tag_is_refused(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts/wheel.sh"), str(tmp_path)]
    environ = os.environ | {"TAG": "v0.0.1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, [*tmp_path.iterdir()]) == (2, [])
    assert f"v0.0.1, and asyncrl/__init__.py has version {__version__}" in done.stderr


class Item:
    """The parts of a pytest item that the choice of a part reads."""

    def __init__(self, file: str, name: str, *marks: str) -> None:
        self.path = Path(file)
        self.nodeid = f"{file}::{name}"
        self.marks = marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def test_each_slow_test_is_in_one_part_and_others_in_all() -> None:
    quick = [Item("test_buffer.py", "a"), Item("test_slow_0.py", "quick")]
    quick += [Item(file, "a", "slow") for file in conftest.IN_EACH_PART]
    slow = [Item(f"test_slow_{number}.py", "a", "slow") for number in range(8)]
    slow += [Item(f"test_slow_{number}.py", "b", "vllm") for number in range(8)]
    slow += [Item("test_table.py", str(n), "long", "rotated") for n in range(8)]
    items: Any = quick + slow
    left_out = Counter[str]()
    for part in (1, 2, 3, 4):
        others: Any = conftest.of_other_parts(items, part, 4)
        left_out.update(item.nodeid for item in others)
        for file in {item.path for item in slow[:16]}:
            assert sum(item.path == file for item in others) in (0, 2)
    assert {*left_out.values()} == {3}
    assert left_out.keys() == {item.nodeid for item in slow}
