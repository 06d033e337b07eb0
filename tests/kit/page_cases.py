"""Runs and samples whose pages are looked at."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from asyncrl.base.waits import TimedSpan
from asyncrl.config import RunConfig, run_config_yaml
from asyncrl.journal import schema
from asyncrl.observe.report_page import (
    make_page,
)
from asyncrl.observe.run_dir import Recorder, append_lines
from asyncrl.observe.timeline import (
    TimelineWriter,
)

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 /*STYLE*/ /*DATA*/ ${x} `\\"


SECTIONS: dict[str, Any] = {
    "model": {"path": "m"},
    "task": {"python": "a:B"},
    "buffer": {"max_staleness": 2},
    "trainer": {"num_steps": 9},
}


def make_run(
    run_dir: Path, num_steps: int = 4, *, state: str = "done", **sections: Any
) -> Path:
    """Write a run directory with steps of one second."""
    run_dir.mkdir(exist_ok=True)
    config = RunConfig.model_validate({**SECTIONS, **sections})
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    recorder = Recorder(run_dir)
    spans = TimelineWriter(run_dir)
    spans.open()
    for step in range(num_steps):
        numbers = {
            "reward/mean": 0.1 * step,
            "sample/staleness_mean": 1.0,
            "sample/staleness_max": 2,
        }
        times = {"perf/step_s": 1.0, "perf/train_s": 0.6, "perf/wait_generation_s": 0.3}
        others = {"policy/entropy": 2.0, "perf/host_memory_bytes": 2.0**30}
        recorder.record_step(
            {"step": step + 1, "time_s": step + 1.0, **numbers, **times, **others}
        )
        note_step(spans, step, 1.0 + step)
    if num_steps:
        texts = ("b 7", HOSTILE, "1 \u202e2 + 3 \x1b[2J\x00")
        lines = [make_sample(step=step, text=text) for step, text in enumerate(texts)]
        append_lines(run_dir / "samples.jsonl", lines)
    recorder.write_status(
        {"state": state, "why": "the disk is full" if state == "failed" else ""}
    )
    spans.flush()
    schema.create(run_dir / "journal.sqlite", "a run")
    return run_dir


def note_step(spans: TimelineWriter, step: int, start_s: float) -> None:
    spans.note(
        TimedSpan("trainer", "wait for generation", start_s, start_s + 0.3, step)
    )
    spans.note(TimedSpan("trainer", "train", start_s + 0.3, start_s + 0.9, step))
    spans.note(
        TimedSpan(
            "weight sync", "commit", start_s + 1.0, start_s + 1.1, step + 1, HOSTILE
        )
    )


def make_sample(*, step: int, text: str = "b 7") -> Any:
    numbers = {
        "num_sampled": 1,
        "versions": [step, step],
        "staleness": 0,
        "logprob_gap": None,
    }
    flags = {
        "is_truncated": False,
        "num_interruptions": 0,
        "error": None,
        "reward": 0.5,
        "metrics": {},
    }
    names = {
        "step": step,
        "kind": "best",
        "group_id": 0,
        "sample_index": 0,
        "prompt_id": "p",
    }
    names |= {"task": None, "answer": None}
    parts = [
        {
            "branch": 0,
            "is_sampled": True,
            "text": text,
            "tokens": "150",
            "versions": [[0, step]],
        }
    ] * 2
    flags |= {"advantage": 0.5, "group": [[0, 0.5, 0.5, 1, text]]}
    messages = [{"role": "user", "content": text}]
    return {**names, **numbers, **flags, "parts": parts, "messages": messages}


def page_of(*run_dirs: Path) -> Any:
    return make_page(run_dirs)


def embedded(html: str) -> Any:
    (found,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL
    )
    return json.loads(found)
