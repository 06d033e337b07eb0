"""The HTML page of runs, drawn by static/page.js from JSON. Text of models, tasks and
users is never HTML.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from asyncrl import __version__
from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
from asyncrl.config.engineless_config import EnginelessConfig
from asyncrl.config.load import sections, value_text
from asyncrl.config.trainer_config import PROFILE_FOLDER
from asyncrl.journal.read import failure_counts
from asyncrl.observe.metrics import gauge_of
from asyncrl.observe.read_run import read_run
from asyncrl.observe.run_dir import (
    REPORT_FILE,
    SUMMARY_FILE,
    read_journal,
    read_object,
    read_settings,
)
from asyncrl.observe.run_numbers import Steps, recent
from asyncrl.observe.timeline import (
    read_marks,
    read_timeline,
    timeline_view,
    write_trace,
)

STATIC = Path(__file__).parent / "static"
MAX_POINTS = 4096
MAX_CAUSES = 50
NUM_SAMPLES = 60
"""Newest samples that the page shows at once, and older samples spread over the run."""
MAX_PACKED_BYTES = 2**22
"""Limit of the other samples, which the page unpacks after its first drawing. 20 MB of
samples.jsonl are about 2 MB.
"""
MAX_PACKED_LIVE_BYTES = 2**18
"""The same for `asyncrl watch`, which sends them again after each step."""
HIDDEN = "(hidden)"
MIN_SECRET_CHARS = 8
"""Shorter secrets are hidden only in their own setting."""
_SECRET_NAME = re.compile(
    r"(^|[_-])(api[_-]?key|key|token|secret|password|passwd|credentials?|auth|authorization)$",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(
    r"\b(?:sk|hf|gh[opsu]|glpat|xox[abp])[-_][\w-]{16,}"
    r"|(?<=Bearer )[\w.~+/-]{16,}"
    r"|(?i:(?<=api_key=)|(?<=apikey=)|(?<=token=)|(?<=password=)|(?<=secret=))[\w.~+/-]{8,}"
)
"""Keys of well-known services, and values after a secret's name."""

# ---- the report


class Page(TypedDict):
    """The data of the page. `made_s`: in seconds since the epoch."""

    asyncrl: str
    made_s: float
    is_live: bool
    runs: list[dict[str, Any]]


def make_page(run_dirs: Sequence[Path], *, is_live: bool = False) -> Page:
    """Return the data of the page: of one run, or of several to compare. Raises
    ConfigError.
    """
    most_bytes = MAX_PACKED_LIVE_BYTES if is_live else MAX_PACKED_BYTES
    runs = [view_run(run_dir, most_bytes) for run_dir in run_dirs]
    # Runs in different folders may have the same name.
    if len({run["name"] for run in runs}) < len(runs):
        runs = [run | {"name": run["run_dir"]} for run in runs]
    return {
        "asyncrl": __version__,
        "made_s": time.time(),
        "is_live": is_live,
        "runs": runs,
    }


def render(page: Page) -> str:
    """The data is ASCII JSON without `<`, so that no text of a model can close its
    element.
    """
    assets = sorted(
        STATIC.iterdir(),
        key=lambda path: (not path.name.startswith("uPlot"), path.name),
    )
    parts = {
        kind: "\n".join(
            path.read_text(encoding="utf-8") for path in assets if path.suffix == suffix
        )
        for kind, suffix in (("STYLE", ".css"), ("SCRIPT", ".js"))
    }
    parts["DATA"] = json.dumps(page, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    template = (STATIC / "page.html").read_text(encoding="utf-8")
    # In one pass, so that a text of a model that looks like a marker stays text. As a
    # function, because re.sub would interpret the backslashes of a string.
    return re.sub(r"/\*(STYLE|SCRIPT|DATA)\*/", lambda place: parts[place[1]], template)


def write_report(run_dirs: Sequence[Path], out: Path | None) -> Iterator[str]:
    """Write the page, and trace.json per run; yield a line for each file. Raises
    ConfigError.
    """
    page = make_page(run_dirs)
    path = out or (
        run_dirs[0] / REPORT_FILE if len(run_dirs) == 1 else Path(REPORT_FILE)
    )
    try:
        write_whole(path, render(page))
    except OSError as error:
        raise ConfigError(
            f"cannot write the page to {path}: {error.strerror}",
            way_out="give another file with --out.",
        ) from error
    yield f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser"
    for run_dir in run_dirs:
        with contextlib.suppress(OSError):  # another user's run
            yield f"{write_trace(run_dir)}: for https://ui.perfetto.dev"
        for profile in profiles_of(run_dir):
            site = (
                "pytorch.org/memory_viz"
                if profile.suffix == ".pickle"
                else "ui.perfetto.dev"
            )
            yield f"{profile}: for https://{site}"
    for run in page["runs"]:
        yield from (f"{run['name']}: {problem}" for problem in run["problems"])


def profiles_of(run_dir: Path) -> list[Path]:
    """Return the files of trainer.profile_steps."""
    return sorted((run_dir / PROFILE_FOLDER).glob("[!.]*-step-*"))


# ---- one run as JSON values


def view_run(run_dir: str | Path, most_bytes: int = MAX_PACKED_BYTES) -> dict[str, Any]:
    """`problems` lists unreadable data. `packed`: samples that are not in `samples`, as
    JSON, gzip and base64; of more than `most_bytes`, only every n-th sample. Raises
    ConfigError.
    """
    files = read_run(run_dir)
    folder = files.run_dir
    steps = files.columns
    curves = curves_of(steps)
    num_points = len(curves.get("step", ()))
    rewards = steps.values("reward/mean")
    num_recent = len(rewards[recent(len(rewards))])
    older = files.samples[:-NUM_SAMPLES]
    every = 1 + len(older) // NUM_SAMPLES
    others = [sample for at, sample in enumerate(older) if at % every]
    summary = read_object(folder / SUMMARY_FILE, [])
    secrets: list[str] = []
    given = read_settings(folder)
    # A job without engines has no groups, and no journal.
    has_groups = not isinstance(files.config, EnginelessConfig)
    failed = read_journal(folder, files.problems, failure_counts) if has_groups else []
    settings = _settings(_masked(given.model_dump(mode="json"), "", secrets))
    view: dict[str, object] = {
        "name": folder.resolve().name,
        "run_dir": str(folder),
        "state": files.state,
        "progress": ". ".join(filter(None, (files.progress, files.why))),
        "why": files.why,
        "max_staleness": files.config.buffer.max_staleness,
        "verdict": files.verdict and asdict(files.verdict),
        "num_recent": num_recent,
        "window": max(1, round(num_recent * num_points / max(1, len(steps)))),
        "step": curves.pop("step", []),
        "time_s": curves.get("time_s", [0.0] * num_points),
        "curves": curves,
        "evaluations": files.evaluation_lines,
        "gauges": {
            name: gauge._asdict() for name in curves if (gauge := gauge_of(name))
        },
        "timeline": timeline_view(read_timeline(folder, files.problems)),
        "samples": older[::every] + files.samples[-NUM_SAMPLES:],
        "num_samples": len(files.samples),
        "failures": _failures(failed or []),
        "marks": read_marks(folder),
        "warnings": summary.get("warnings") or files.status.get("warnings") or [],
        "settings": settings,
        "profiles": [path.name for path in profiles_of(folder)],
        "problems": files.problems,
    }
    long_secrets = sorted(
        (secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS), key=len
    )
    shown = {key: without_secrets(value, long_secrets) for key, value in view.items()}
    # Compressed after the secrets are hidden, which would not be found in it.
    return shown | {
        "packed": _packed(without_secrets(others, long_secrets), most_bytes)
    }


def _packed(samples: Any, most_bytes: int) -> str:
    text = json.dumps(samples, allow_nan=False, separators=(",", ":"))
    # Without the time of day, so that an unchanged run has the same text.
    packed = gzip.compress(text.encode(), mtime=0)
    if len(packed) > most_bytes:
        return _packed(samples[:: 1 + len(packed) // most_bytes], most_bytes)
    return base64.b64encode(packed).decode()


def without_secrets(value: object, secrets: list[str]) -> object:
    """Hide the secrets (shortest first), and keys of well-known services."""
    if isinstance(value, str):
        # Longest first: a secret may contain another one.
        for secret in reversed(secrets):
            value = value.replace(secret, HIDDEN)
        return _SECRET_TEXT.sub(HIDDEN, value)
    if isinstance(value, Mapping):
        return {key: without_secrets(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        is_numbers = not value or isinstance(value[-1], float)
        return (
            value if is_numbers else [without_secrets(item, secrets) for item in value]
        )
    return value


def _masked(value: object, name: str, secrets: list[str]) -> object:
    """Hide generator.env and values with a name such as api_key; add them to `secrets`."""
    if isinstance(value, Mapping):
        return {
            key: _masked(item, f"{name}.{key}", secrets) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_masked(item, name, secrets) for item in value]
    is_secret = name.startswith(".generator.env.") or _SECRET_NAME.search(
        name.rpartition(".")[2]
    )
    if not is_secret or not isinstance(value, str) or not value:
        return value
    secrets.append(value)
    return HIDDEN


def _settings(values: object) -> list[dict[str, object]]:
    defaults = {key.name: key.default for *_, keys in sections() for key in keys}
    # Sections, whose keys have rows here. Other mappings, such as rollout.vllm, are the
    # value of one key.
    parents = {name.rpartition(".")[0] for name in defaults}
    settings = list[dict[str, object]]()
    for key, default in defaults.items():
        value = values
        for name in key.split("."):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        if value is ... or (isinstance(value, dict) and key in parents):
            continue
        text = value_text(value)
        default_text = None if default == "must be given" else default
        settings.append(
            {
                "key": key,
                "value": text,
                "default": default_text,
                "differs": text != default_text,
            }
        )
    return settings


def curves_of(steps: Steps) -> dict[str, list[float | None]]:
    """Return at most MAX_POINTS values of each metric, evenly spread over the steps."""
    every = 1 + (len(steps) - 1) // MAX_POINTS
    if not steps:
        return {}
    return {
        name: [
            None if value != value else float(f"{value:.6g}")
            for value in steps.column(name)[::every]
        ]
        for name in steps.names
    }


def _failures(failed: Sequence[tuple[str, int]]) -> list[dict[str, object]]:
    """Count failures by cause, each with an example."""
    counts = Counter[str]()
    examples: dict[str, str] = {}
    for why, num in failed:
        # Messages name their rollout and its numbers. Without these, the same failure
        # counts as one cause.
        cause = cause_of(why)
        counts[cause] += num
        examples.setdefault(cause, why[:2000])
    return [
        {"cause": cause, "count": num, "example": examples[cause]}
        for cause, num in counts.most_common(MAX_CAUSES)
    ]


def cause_of(why: str) -> str:
    """Return a message's first line without quoted names and numbers."""
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", why.strip().partition("\n")[0][:600])
    number = r"\b(?:g\d+(?:/r\d+)?|r\d+|0x[0-9a-f]+|[0-9a-f]{12,}|\d[\d.,]*)"
    return re.sub(number, "N", line)[:160] or "no reason recorded"
