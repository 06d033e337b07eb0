"""`asyncrl report`: the page of runs as one HTML file, without network."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from asyncrl import __version__
from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
from asyncrl.observe.page.view import view_run
from asyncrl.observe.run_dir import REPORT_FILE, TRACE_FILE
from asyncrl.observe.timeline import write_trace

Page = dict[str, Any]
_PLACES = re.compile(r"/\*(STYLE|SCRIPT|DATA)\*/")


def make_page(runs: Sequence[dict[str, Any]], *, is_live: bool = False) -> Page:
    """Runs of the same name are named by their directories."""
    names = [run["name"] for run in runs]
    for run in runs:
        if names.count(run["name"]) > 1:
            run["name"] = run["run_dir"]
    return {"asyncrl": __version__, "made_s": time.time(), "is_live": is_live, "runs": [*runs]}


def render(page: Page) -> str:
    """The data is ASCII JSON without `<`, so that no text of a model can close its element."""
    folder = files("asyncrl.observe.page")
    texts = {entry.name: entry for entry in (folder / "static").iterdir()}
    names = sorted(texts, key=lambda name: (not name.startswith("uPlot"), name))
    parts = {
        kind: "\n".join(texts[name].read_text(encoding="utf-8") for name in names if name.endswith(ending))
        for kind, ending in (("STYLE", ".css"), ("SCRIPT", ".js"))
    }
    parts["DATA"] = json.dumps(page, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    template = (folder / "page.html").read_text(encoding="utf-8")
    return _PLACES.sub(lambda place: parts[place[1]], template)


def write_report(run_dirs: Sequence[Path], out: Path | None) -> Iterator[str]:
    """Write the page, and trace.json per run; yield a line for each file. Raises ConfigError."""
    page = make_page([view_run(run_dir) for run_dir in run_dirs])
    path = out or (run_dirs[0] / REPORT_FILE if len(run_dirs) == 1 else Path(REPORT_FILE))
    try:
        write_whole(path, render(page))
    except OSError as error:
        raise ConfigError(
            f"cannot write the page to {path}: {error.strerror}", way_out="give another file with --out."
        ) from error
    yield f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser"
    for run_dir in run_dirs:
        try:
            yield f"{write_trace(run_dir)}: for https://ui.perfetto.dev"
        except OSError as error:
            yield f"no {TRACE_FILE} in {run_dir}: {error.strerror}"
    for run in page["runs"]:
        yield from (f"{run['name']}: {problem}" for problem in run["problems"])
