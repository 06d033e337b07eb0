"""The time line of a run for the page: spans by lane, and events of the journal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from asyncrl.observe.page.shape import Timeline
from asyncrl.observe.run_dir import tell
from asyncrl.observe.timeline import Row, merged_slots

MAX_SPANS, NUM_NEWEST, MAX_SLOTS, MAX_ENGINES = 5000, 2500, 1000, 256
KINDS = {
    "wait for generation": "the trainer waits for rollouts to be generated",
    "wait for stragglers": "the trainer waits for groups that would become too old",
    "wait for publishing": "the trainer waits for a newer version to be served",
    "train": "the trainer works on a batch: forward, backward, optimizer step",
    "to trainer": "in turns: the devices go to the trainer",
    "to engines": "until the copy of the new weights is begun; in turns: until the engines serve them",
    "journal": "the batch becomes durable in the journal",
    "copy": "the trainer is held until a checkpoint's copy of the weights is begun",
    "record": "metrics of the step are computed and written; after the step, not part of its seconds",
    "train again": "after a resume: journaled batches are trained again",
    "save": "the last weights are written",
    "export": "new weights are written to where engines take them from",
    "prepare": "engines take the new weights beside generation",
    "chunks": "in turns: the new weights go to the engines chunk by chunk",
    "commit": "engines swap to the new weights",
    "pause": "an engine does not decode, for it swaps weights",
    "checkpoint": "a checkpoint is written",
    "evaluation": "weights are evaluated",
    "held for an evaluation": "new weights wait until the engines have ended an evaluation",
    "start": "processes start and load the model",
    "down": "a process was lost, until a new one was where it had been",
    "gone": "nothing ran: the run had been killed or interrupted",
    "event": "something that the journal notes",
}
"""Kinds of spans and their meanings."""
_FIRST, _LAST = ("trainer", "weight sync"), ("handovers", "checkpoints", "evaluations", "start", "restarts")
_OF_VERSION = frozenset(
    "export, prepare, chunks, commit, pause, checkpoint, evaluation, held for an evaluation".split(", ")
)
_BUSY = {"trainer", "weight sync", "handovers"}
"""Lanes with spans in every step, like the lanes of engines."""


def timeline_view(
    rows: Sequence[Row], events: Iterable[tuple[float, str]], problems: list[str], num_slots: int
) -> Timeline:
    """Build the time line from the `rows` of timeline.jsonl and the `events` of the journal, (seconds since
    the epoch, text). `num_slots`: slots of an engine.
    """
    spans, slots = spans_of(rows, problems), [row for row in rows if row[1] == "slots"]
    told = [("restarts", "event", at_s, 0.0, -1, text) for at_s, text in events]
    kept, is_cut = _bounded([*spans, *told])
    is_thinned = is_cut or any(row[1] == "thinned" for row in rows)
    start_s = min((row[2] for row in (*kept, *slots)), default=0.0)
    by_engine = _slots_by_engine(merged_slots(slots, MAX_SLOTS), start_s)
    lanes = lane_names({row[0] for row in kept} | by_engine.keys())
    numbers = {name: number for number, name in enumerate(lanes)}
    kinds = {name: number for number, name in enumerate(KINDS)}
    return {
        "start_s": start_s,
        "lanes": lanes,
        "kinds": [{"name": name, "meaning": meaning} for name, meaning in KINDS.items()],
        "spans": [
            (
                numbers[row[0]],
                kinds[row[1]],
                round(row[2] - start_s, 4),
                round(row[2] + row[3] - start_s, 4),
                span_text(row),
            )
            for row in kept
            if row[0] in numbers
        ],
        "slots": by_engine,
        "num_slots": num_slots,
        "is_thinned": is_thinned,
    }


def spans_of(rows: Sequence[Row], problems: list[str]) -> list[Row]:
    """Return the spans of known kinds. The first start is no restart and has its own lane; the time without
    any process before a later start becomes a span.
    """
    found, is_started = list[Row](), False
    for row in rows:
        if not row[0]:
            continue
        if row[1] not in KINDS:
            tell(problems, f"timeline.jsonl has a span of an unknown kind, {row[1][:40]!r}")
            continue
        if row[1] == "start" and not is_started:
            row, is_started = ("start", *row[1:4], -1, row[5]), True
        found.append(row)
    gone = list[Row]()
    for start_s in (row[2] for row in found if row[1] == "start"):
        end_s = max((row[2] + row[3] for row in found if row[2] < start_s), default=start_s)
        if end_s < start_s:
            gone.append(("restarts", "gone", end_s, start_s - end_s, -1, ""))
    return [*found, *gone]


def span_text(row: Row) -> str:
    """Return the step or version of a span, and its text."""
    of = f"version {row[4]}" if row[1] in _OF_VERSION else f"step {row[4] + 1}"
    of = of if row[4] >= 0 else ""
    return ": ".join(filter(None, (of, row[5])))


def lane_names(names: set[str]) -> list[str]:
    """Sort lanes from the top."""
    engines = sorted(names - {*_FIRST, *_LAST}, key=_natural)[:MAX_ENGINES]
    return [name for name in (*_FIRST, *engines, *_LAST) if name in names]


def _natural(name: str) -> tuple[str, int]:
    """Sort engine-2 before engine-10."""
    digits = re.search(r"\d+$", name)
    return (name[: digits.start()], int(digits[0][:9])) if digits else (name, -1)


def _bounded(rows: list[Row]) -> tuple[list[Row], bool]:
    """Keep at most MAX_SPANS by time: the newest, and the longest of the others."""
    rows = sorted(rows, key=lambda row: row[2])
    if len(rows) <= MAX_SPANS:
        return rows, False
    older = sorted(rows[:-NUM_NEWEST], key=lambda row: (row[0] in _BUSY, -row[3]))
    kept = older[: MAX_SPANS - NUM_NEWEST] + rows[-NUM_NEWEST:]
    return sorted(kept, key=lambda row: row[2]), True


def _slots_by_engine(rows: list[Row], start_s: float) -> dict[str, list[tuple[float, float]]]:
    """Return busy slots over time; 0 in gaps without notes."""
    found, ends_s = dict[str, list[tuple[float, float]]](), dict[str, float]()
    for _, _, at_s, seconds, _, means in rows:
        for name, busy in means.items():
            line = found.setdefault(name, [])
            if name in ends_s and at_s - ends_s[name] > max(2.0, seconds):
                line.append((round(ends_s[name] - start_s, 3), 0.0))
            line.append((round(at_s - start_s, 3), float(busy)))
            ends_s[name] = at_s + seconds
    for name, end_s in ends_s.items():
        found[name].append((round(end_s - start_s, 3), 0.0))
    return found


Events = list[tuple[float, str, dict[str, Any]]]


def shown_events(events: Events) -> list[tuple[float, str]]:
    """Return the events without a span: lost, resumed, parked, stuck."""
    return [
        (at_s, event_text(what, detail))
        for at_s, what, detail in events
        if not (what.startswith("hand") or what.endswith(" up"))
    ]


def event_text(what: str, detail: dict[str, Any]) -> str:
    """Describe an event of the journal."""
    who, why = detail.get("name"), detail.get("why")
    seconds = detail.get("down_s", detail.get("seconds"))
    text = f"{what}: {who}" if who else what
    text += f" {detail['version']}" if "version" in detail else ""
    text += f", after {seconds:.1f} s" if isinstance(seconds, int | float) else ""
    return f"{text}: {why}".splitlines()[0][:400] if why else text
