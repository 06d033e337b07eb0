"""What the page says of a run beside its curves: settings, failures by cause, warnings, commands, samples."""

from __future__ import annotations

import os
import re
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.config.load import sections
from asyncrl.files import lines_from_end
from asyncrl.observe.page.lanes import Events, event_text
from asyncrl.observe.page.shape import Failure, Setting
from asyncrl.observe.recorder import SAMPLES_FILE, parse_line, reading, tell
from asyncrl.observe.samples import ShownRollout, as_sample

HIDDEN = "(hidden)"
NUM_NEWEST, NUM_SPREAD, MAX_SAMPLE_BYTES = 60, 60, 2**20
MAX_CAUSES, MAX_FAILURES, MAX_EVENTS = 50, 100_000, 1000
_FREE = ("generator.env",)
"""Settings whose every value may be a secret."""
_SECRET_NAME = re.compile(
    r"(^|[_-])(api[_-]?key|key|token|secret|password|passwd|credentials?|auth|authorization)$", re.IGNORECASE
)
_SECRET = re.compile(
    r"(?<=://)[^/@\s]+(?=@)|(?<=key=)[^\s&]+|(?<=token=)[^\s&]+|(?<=password=)[^\s&]+"
    r"|\b(?:sk|hf|ghp|gho|glpat|xox[bp])[-_][\w-]{8,}|\bAKIA[0-9A-Z]{12,}|(?<=Bearer )\S+",
    re.IGNORECASE,
)


def without_secrets(value: Any, name: str = "") -> Any:
    """The same with what looks like a secret hidden: values by such a name, and texts of such a form."""
    if isinstance(value, Mapping):
        return {key: without_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET_NAME.search(name) else _SECRET.sub(HIDDEN, value)
    return value


def settings_of(config: RunConfig) -> list[Setting]:
    """All that are set, each section's keys in their order; no secrets."""
    values, found = config.model_dump(mode="json"), list[Setting]()
    names = {key.name for _, _, keys in sections() for key in keys}
    for key in (key for _, _, keys in sections() for key in keys):
        value: Any = values
        for name in key.name.split("."):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        is_section = any(name.startswith(f"{key.name}.") for name in names)
        if value is ... or (is_section and isinstance(value, dict)):
            continue
        default = None if key.default == "must be given" else key.default
        differs = _text(value) != default
        shown = dict.fromkeys(value, HIDDEN) if key.name in _FREE else without_secrets(value)
        found.append({"key": key.name, "value": _text(shown), "default": default, "differs": differs})
    return found


def _text(value: Any) -> str:
    """As `asyncrl keys` writes a default."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def commands_for(run_dir: Path, state: str, config: RunConfig) -> list[tuple[str, str]]:
    """Return the next commands with the paths of this run."""
    more = [f"trainer.num_steps={2 * config.trainer.num_steps}"]
    if config.trainer.schedule != "constant":
        more += ["--allow-change", "trainer.num_steps"]
    folder = str(run_dir)
    again = ["asyncrl", "run", str(run_dir / "config.yaml"), "--run-dir", folder]
    is_live = state in ("starting", "running")
    go_on = [] if is_live else [("Continue training", again)]
    if state == "done":
        go_on = [("Continue training for as many steps again", [*again, *more])]
    rest = [
        ("Status", ["asyncrl", "status", folder]),
        ("Inspect batches and rollouts", ["asyncrl", "inspect", folder]),
        ("Open live page", ["asyncrl", "watch", folder]),
        ("Export weights", ["asyncrl", "export", folder, "OUT"]),
    ]
    return [(what, shlex.join(words)) for what, words in (*go_on, *rest)]


def events_of(connection: sqlite3.Connection) -> Events:
    """The newest of the journal, oldest first."""
    rows = connection.execute("SELECT s, what, detail FROM events ORDER BY id DESC LIMIT ?", (MAX_EVENTS,))
    found = ((float(at_s), str(what), parse_line(detail.encode()) or {}) for at_s, what, detail in rows)
    return [*found][::-1]


def warnings_of(status: Mapping[str, Any], summary: Mapping[str, Any], events: Events) -> list[str]:
    """What the run warned of, then what was lost and started again."""
    told = summary.get("warnings") or status.get("warnings") or []
    texts = [str(text) for text in told] if isinstance(told, list) else []
    stops = ("lost", "stuck", "restored", "broken", "failed")
    return texts + [event_text(what, detail) for _, what, detail in events if what.split()[-1] in stops]


def failures_of_run(connection: sqlite3.Connection) -> list[Failure]:
    """Failed rollouts by cause, then groups that came to nothing, most of them first. Messages are deleted
    with the tokens of old groups: what is left of those is their number.
    """
    count, example = dict[str, int](), dict[str, str]()

    def add(why: str, num: int, prefix: str = "") -> None:
        cause = prefix + cause_of(why)
        if cause not in count and len(count) >= MAX_CAUSES:
            cause = "other causes"
        count[cause] = count.get(cause, 0) + num
        example.setdefault(cause, why[:2000])

    rows = connection.execute("SELECT why, count(*) FROM failures GROUP BY why LIMIT ?", (MAX_FAILURES,))
    for why, num in rows:
        add(str(why), num)
    (num_failed,) = connection.execute("SELECT coalesce(sum(num_failed), 0) FROM groups").fetchone()
    if (num_old := num_failed - sum(count.values())) > 0:
        count["rollouts whose message is deleted"], example["rollouts whose message is deleted"] = num_old, ""
    groups = "SELECT state, reason, count(*) FROM groups WHERE reason <> '' GROUP BY 1, 2 LIMIT ?"
    for state, reason, num in connection.execute(groups, (MAX_FAILURES,)):
        add(str(reason), num, f"group {str(state).replace('_', ' ')}: ")
    ordered = sorted(count, key=lambda cause: -count[cause])
    return [{"cause": cause, "count": count[cause], "example": example[cause]} for cause in ordered]


def cause_of(why: str) -> str:
    """The same for failures that differ in names and numbers alone."""
    line = why.strip().splitlines()[0] if why.strip() else "no reason recorded"
    line = re.sub(r"^g\d+.*?; r\d+ ", "", line)
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", line[:600])
    return re.sub(r"\b(?:g\d+(?:/r\d+)?|0x[0-9a-f]+|[0-9a-f]{12,}|\d[\d.,]*)", "N", line)[:160]


def some_samples(run_dir: Path, problems: list[str]) -> list[ShownRollout]:
    """The newest ones, and as many spread over the file: no more of it is read than that."""
    path, found = run_dir / SAMPLES_FILE, dict[int, ShownRollout]()
    with reading(path, problems):
        for begin, line in _some_lines(path):
            try:
                found[begin] = as_sample(parse_line(line))
            except ValueError:
                tell(problems, f"{path.name} has a line that is no sample, at byte {begin}")
    return [found[begin] for begin in sorted(found)]


def _some_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(where it begins, the line), each once; half a line at the end, which is being written, is left out."""
    size, begin, room = path.stat().st_size, 0, MAX_SAMPLE_BYTES
    for number, (begin, line) in enumerate(lines_from_end(path)):
        if line.endswith(b"\n"):
            yield begin, line
        room -= len(line)
        if number + 1 >= NUM_NEWEST or room < 0:
            break
    oldest, newest = begin, -1
    with path.open("rb") as file:
        for index in range(NUM_SPREAD):
            file.seek(max(0, oldest * index // NUM_SPREAD - 1))
            if index:
                file.readline(MAX_SAMPLE_BYTES)
            at, line = file.tell(), file.readline(MAX_SAMPLE_BYTES)
            if newest < at < min(oldest, size) and line.endswith(b"\n"):
                newest = at
                yield at, line


def read_summary(run_dir: Path) -> Mapping[str, Any]:
    """summary.json; {} without one that can be read."""
    try:
        with (run_dir / "summary.json").open("rb") as file:
            return parse_line(file.read(2**22)) or {}
    except OSError:
        return {}


def name_of(run_dir: Path) -> str:
    """Of the folder, wherever it is called from."""
    return os.path.basename(os.path.abspath(run_dir))  # noqa: PTH100, PTH119
