"""Stand-in until the reader of runs is merged: it has the names of the real one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from asyncrl.observe.page.shape import Page

_HERE = Path(__file__).parent


def make_page(run_dirs: Sequence[str | Path], *, is_live: bool = False) -> Page:
    """What the page shows."""
    raise NotImplementedError(run_dirs, is_live)


def render(page: Page) -> str:
    """The HTML of the page, complete in itself."""
    joined = {"DATA": json.dumps(page, allow_nan=False).replace("<", "\\u003c")}
    for name, ending in (("STYLE", "css"), ("SCRIPT", "js")):
        paths = sorted((_HERE / "static").glob(f"*.{ending}"))
        joined[name] = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    template = (_HERE / "page.html").read_text(encoding="utf-8")
    return re.sub(r"/\*(STYLE|SCRIPT|DATA)\*/", lambda place: joined[place[1]], template)
