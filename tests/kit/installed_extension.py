"""The extension `pager` of a package acme-pager, as an installation leaves it in a
folder of packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from job_runs import ROOT, environment

from asyncrl.base.extensions import SWITCH

RECORD = """
from asyncrl.base.extensions import Extension, HarnessKind

EXTENSION = Extension(
    about="Rollouts that page somebody.",
    fields={"": "acme_pager.settings:TOP", "generator": "acme_pager.settings:FIELDS"},
    harnesses={"pager": HarnessKind("acme_pager.pages:Pager", "NUMBER", "a pager")},
    commands={"page": "acme_pager.pages:page"},
    check="acme_pager.pages:check_number",
)
"""
SETTINGS = """
from pydantic import Field
from asyncrl.base.extensions import AddedField
from asyncrl.config.fields import FrozenConfig

class PagerConfig(FrozenConfig):
    \"\"\"Pagers.\"\"\"

    free_keys = ("tries",)
    number: int = Field(default=1, ge=1)
    \"\"\"Pagers in use.\"\"\"
    tries: int = 3
    \"\"\"Calls of each.\"\"\"

    def conflicts(self):
        if self.number > self.tries:
            yield f"number={self.number} needs as many tries"

NUMBER = AddedField[str | None]("pager", str | None, "Number of a pager.", None)
VOLUME = AddedField[int]("volume", int, "Volume.", 3, is_free=True)
PAGERS = AddedField[PagerConfig | None]("pagers", PagerConfig | None, "Pagers.", None)
FIELDS = (NUMBER, VOLUME)
TOP = (PAGERS,)
"""
PAGES = """
from asyncrl.base.errors import ConfigError
from acme_pager.settings import NUMBER

class Pager:
    def __init__(self, config, *, is_worker=False):
        self.number = NUMBER.of(config)

    async def run(self, task, session):
        answer = await session.client.chat.completions.create(
            model=session.model, messages=[dict(each) for each in task.messages]
        )
        return float(len(answer.choices[0].message.content or ""))

def page(number: str) -> None:
    \"\"\"Page somebody.\"\"\"
    print(f"paging {number}")

def check_number(config, tasks):
    number = NUMBER.of(config.generator)
    if number == "n0":
        raise ConfigError("generator.pager=n0 is not a number")
    if number:
        yield f"pager {number} answers"
"""


def install(
    folder: Path,
    files: Mapping[str, str] = {},
    name: str = "pager",
    version: str = "1.0",
) -> Path:
    """Install the package into `folder`, with some of its files replaced."""
    package = f"acme_{name}"
    written = {
        f"{package}/__init__.py": RECORD,
        f"{package}/settings.py": SETTINGS,
        f"{package}/pages.py": PAGES,
        f"{package}-{version}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: {version}\n"
        ),
        f"{package}-{version}.dist-info/entry_points.txt": (
            f"[asyncrl.extensions]\n{name} = {package}:EXTENSION\n"
        ),
    }
    written |= {f"{package}/{file}": text for file, text in files.items()}
    for file, text in written.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("acme_pager", package))
    return folder


def python(
    *arguments: str | Path, packages: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, with the packages of a folder."""
    found = environment(**{SWITCH: "", **variables})
    if packages is not None:
        found["PYTHONPATH"] = os.pathsep.join([str(packages), found["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=found,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
