"""Small pieces of text that console, status and inspect share: sparklines, durations, shares of time. Knows numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"

_PARTS = (
    ("train", "perf/train_s"),
    ("wait gen", "perf/wait_generation_s"),
    ("wait stragglers", "perf/wait_stragglers_s"),
    ("wait publish", "perf/wait_publishing_s"),
)


def sparkline(values: Sequence[float], *, width: int) -> str:
    """The values as at most `width` block characters, each the mean of its stretch, from their smallest to their largest."""
    if not values:
        return ""
    num = min(width, len(values))
    edges = [round(index * len(values) / num) for index in range(num + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    if high <= low:
        return _BLOCKS[0] * num
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in means)


def duration(seconds: float) -> str:
    """8.3 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def several(num: float, noun: str) -> str:
    """`1 group`, `3 groups`."""
    return f"{num:.0f} {noun if num == 1 else f'{noun}s'}"


def time_parts(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """(name, share 0..1) of where a step's time went; `other` is the rest. Empty without perf/step_s."""
    known = [(name, seconds.get(key, 0.0)) for name, key in _PARTS]
    whole = max(seconds.get("perf/step_s", 0.0), sum(value for _, value in known))
    if whole <= 0:
        return []
    shares = [(name, value / whole) for name, value in known]
    return [*shares, ("other", max(0.0, 1 - sum(share for _, share in shares)))]


def skipped_text(metrics: Mapping[str, float]) -> str:
    """`step skipped: not finite (batch 11, counted from 0)`; '' where no optimizer step of the batch was.

    Whoever reads it beside `step 12/300` learns that both are the same: files and logs name the batch.
    """
    num = metrics.get("trainer/skipped_steps", 0.0)
    what = "step" if num == 1 else several(num, "step")
    return f"{what} skipped: not finite (batch {metrics['step']:.0f}, counted from 0)" if num else ""


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """One evaluation on a line: `v40 reward 0.413 ± 0.031  12.3 tokens, 2.0% truncated  3.2 s`; what went wrong is told at the end."""
    parts = [f"v{metrics['eval/version']:.0f}"]
    if "eval/reward_mean" in metrics:
        error = f" ± {metrics['eval/standard_error']:.3f}" if "eval/standard_error" in metrics else ""
        parts[0] += f" reward {metrics['eval/reward_mean']:.3f}{error}"
        parts.append(f"{metrics['eval/length_mean']:.1f} tokens, {metrics['eval/truncated_fraction']:.1%} truncated")
    parts.append(f"{metrics['eval/seconds']:.1f} s")
    words = [
        ("eval/failed", "samples failed"),
        ("eval/skipped", "skipped so far"),
        ("eval/abandoned", "abandoned so far"),
        ("eval/abandoned_calls", "reward calls abandoned so far"),
    ]
    parts += [f"{what}: {metrics[name]:.0f}" for name, what in words if metrics.get(name)]
    return "  ".join(parts)
