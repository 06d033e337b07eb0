"""Facts of a run for the page: settings, failures by cause, warnings."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.config.load import sections
from asyncrl.observe.page.lanes import Events, event_text
from asyncrl.observe.page.shape import Failure, Setting
from asyncrl.observe.run_dir import parse

HIDDEN = "(hidden)"
MAX_CAUSES, MAX_FAILURES, MAX_EVENTS = 50, 100_000, 1000
_SECRET_NAME = re.compile(
    r"(^|[_-])(api[_-]?key|key|token|secret|password|passwd|credentials?|auth|authorization)$", re.IGNORECASE
)


def without_secrets(value: Any, name: str = "") -> Any:
    """Hide the values of names such as API_KEY, and of all environment variables."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if name == "generator.env" else without_secrets(item, str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return HIDDEN if isinstance(value, str) and value and _SECRET_NAME.search(name) else value


def settings_of(config: RunConfig) -> list[Setting]:
    """Return all settings of the run, without secrets."""
    values, found = config.model_dump(mode="json"), list[Setting]()
    keys = [key for _, _, of_section in sections() for key in of_section]
    names = {key.name for key in keys}
    for key in keys:
        value: Any = values
        for name in key.name.split("."):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        is_section = any(name.startswith(f"{key.name}.") for name in names)
        if value is ... or (is_section and isinstance(value, dict)):
            continue
        default = None if key.default == "must be given" else key.default
        shown = _text(without_secrets(value, key.name))
        found.append(
            {"key": key.name, "value": shown, "default": default, "differs": _text(value) != default}
        )
    return found


def _text(value: Any) -> str:
    """Write a value as `asyncrl keys` writes a default."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def events_of(connection: sqlite3.Connection) -> Events:
    """Return the newest events of the journal, oldest first."""
    rows = connection.execute("SELECT s, what, detail FROM events ORDER BY id DESC LIMIT ?", (MAX_EVENTS,))
    found = ((float(at_s), str(what), parse(detail.encode()) or {}) for at_s, what, detail in rows)
    return [*found][::-1]


def warnings_of(status: Mapping[str, Any], summary: Mapping[str, Any], events: Events) -> list[str]:
    """Return the warnings of the run, then its losses and restarts."""
    told = summary.get("warnings") or status.get("warnings") or []
    texts = [str(text) for text in told] if isinstance(told, list) else []
    stops = ("lost", "stuck", "restored", "broken", "failed")
    return texts + [event_text(what, detail) for _, what, detail in events if what.split()[-1] in stops]


def failures_of_run(connection: sqlite3.Connection) -> list[Failure]:
    """Count failed rollouts and groups by cause, the most frequent first. The messages of old groups are
    deleted; only their number remains.
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
    """Return the message without its names and numbers."""
    line = why.strip().splitlines()[0] if why.strip() else "no reason recorded"
    line = re.sub(r"^g\d+.*?; r\d+ ", "", line)
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", line[:600])
    return re.sub(r"\b(?:g\d+(?:/r\d+)?|0x[0-9a-f]+|[0-9a-f]{12,}|\d[\d.,]*)", "N", line)[:160]
