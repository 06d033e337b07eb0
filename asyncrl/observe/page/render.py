"""`asyncrl report`: the page of runs as one HTML file that needs no network."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from asyncrl import __version__
from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
from asyncrl.observe.page.run_view import view_run
from asyncrl.observe.page.shape import Difference, Page, RunView
from asyncrl.observe.page.trace import write_trace
from asyncrl.observe.run_dir import REPORT_FILE, TRACE_FILE

_PLACES = re.compile(r"/\*(STYLE|SCRIPT|DATA)\*/")


def make_page(run_dirs: Sequence[str | Path], *, is_live: bool = False) -> Page:
    """Return the data of the page. Raises ConfigError if the folder is no run directory."""
    return page_of([view_run(run_dir) for run_dir in run_dirs], is_live=is_live)


def page_of(runs: Sequence[RunView], *, is_live: bool = False) -> Page:
    """Return the data of the page; runs of one name are named by their directories."""
    names = [run["name"] for run in runs]
    for run in runs:
        if names.count(run["name"]) > 1:
            run["name"] = run["run_dir"]
    return {
        "asyncrl": __version__,
        "made_s": time.time(),
        "is_live": is_live,
        "runs": [*runs],
        "differences": list(differences_of(runs)) if len(runs) > 1 else [],
    }


def differences_of(runs: Sequence[RunView]) -> Iterator[Difference]:
    """Yield different settings of the runs, then different results."""
    settings = [{setting["key"]: setting["value"] for setting in run["settings"]} for run in runs]
    tiles = [{tile["label"]: tile["value"] for tile in run["tiles"]} for run in runs]
    for run, of_run in zip(runs, tiles, strict=True):
        last, noise = run["verdict"]["reward_last"], run["verdict"]["reward_noise"]
        of_run |= {} if last is None else {"reward at the end": f"{last:.3f} ± {noise or 0:.3f}"}
    shares = [{s["name"]: f"{s['fraction']:.0%} of the time" for s in run["shares"]} for run in runs]
    states = [{"state": run["state"]} for run in runs]
    for of_runs in (settings, states, tiles, shares):
        for key in dict.fromkeys(key for of_run in of_runs for key in of_run):
            values = [of_run.get(key, "-") for of_run in of_runs]
            if len(set(values)) > 1:
                yield {"key": key, "values": values}


def render(page: Page) -> str:
    """Return the page with its style, script and data. The data is ASCII JSON without `<`, so that no text of
    a model can close its element.
    """
    static = files("asyncrl.observe.page") / "static"
    texts = {entry.name: entry for entry in static.iterdir()} if static.is_dir() else {}
    names = sorted(texts, key=lambda name: (not name.startswith("uPlot"), name))
    joined = {
        kind: "\n".join(texts[name].read_text(encoding="utf-8") for name in names if name.endswith(ending))
        for kind, ending in (("STYLE", ".css"), ("SCRIPT", ".js"))
    }
    joined["DATA"] = json.dumps(page, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    template = (files("asyncrl.observe.page") / "page.html").read_text(encoding="utf-8")
    return _PLACES.sub(lambda place: joined[place[1]], template)


def write_report(run_dirs: Sequence[Path], out: Path | None) -> Iterator[str]:
    """Write the page, and trace.json into each run directory; yield a line for each file. Raises ConfigError
    for other directories, and if the page cannot be written.
    """
    page = make_page(run_dirs)
    path = out or (run_dirs[0] / REPORT_FILE if len(run_dirs) == 1 else Path(REPORT_FILE))
    try:
        write_whole(path, render(page))
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written to {path}: {error.strerror}", way_out="give another file with --out."
        ) from error
    yield f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser"
    for run_dir in run_dirs:
        try:
            yield f"{write_trace(run_dir)}: for https://ui.perfetto.dev"
        except OSError as error:
            yield f"no {TRACE_FILE} in {run_dir}: {error.strerror}"
    for run in page["runs"]:
        yield from (f"{run['name']}: {problem}" for problem in run["problems"])
