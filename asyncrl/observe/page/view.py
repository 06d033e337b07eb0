"""Stand-in until the reader of runs is merged: it has the names of the real one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from asyncrl.observe.page.shape import Page, RunView

_HERE = Path(__file__).parent


def view_run(run_dir: Path) -> RunView:
    raise NotImplementedError(run_dir)


def make_page(run_dirs: Sequence[Path], is_live: bool = False) -> Page:
    raise NotImplementedError(run_dirs, is_live)


def render(page: Page) -> str:
    """The HTML of the page, complete in itself."""
    parts = {"STYLE": "css", "SCRIPT": "js"}
    joined = {
        name: "\n".join(
            path.read_text(encoding="utf-8") for path in sorted((_HERE / "static").glob(f"*.{end}"))
        )
        for name, end in parts.items()
    }
    joined["DATA"] = json.dumps(page).replace("<", "\\u003c")
    return re.sub(
        r"/\*(STYLE|SCRIPT|DATA)\*/",
        lambda found: joined[found[1]],
        (_HERE / "page.html").read_text(encoding="utf-8"),
    )
