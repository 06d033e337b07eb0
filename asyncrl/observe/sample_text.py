"""Samples as plain text: on the console, in `asyncrl inspect --samples` and in TensorBoard."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.base.errors import ConfigError
from asyncrl.observe.run_numbers import plain, several
from asyncrl.observe.samples import ShownRollout, read_samples

NEWEST, NEWEST_JSON = 10, 1000
"""Samples without --step and --group, as text and as JSON."""
_LABEL = 12


def harmless(text: str) -> str:
    """Write out control characters but the line end, as Python's escapes, for a terminal."""
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(
        one
        if one == "\n" or unicodedata.category(one) not in hidden
        else one.encode("unicode_escape").decode()
        for one in text
    )


def headline(sample: ShownRollout) -> str:
    """Describe a sample in a line."""
    reward = "no reward" if sample["reward"] is None else f"reward {plain(sample['reward'])}"
    what = "failed rollout" if sample["kind"] == "failed" else f"{sample['kind']} sample"
    words = [f"{what} of step {sample['step']}: {reward}"]
    words += [f"{name} {plain(value)}" for name, value in sample["metrics"].items()]
    if sample["versions"]:
        words.append(f"versions {'..'.join(map(str, dict.fromkeys(sample['versions'])))}")
    if sample["staleness"] is not None:
        words.append(f"staleness {sample['staleness']}")
    words.append(several(sample["num_sampled"], "token"))
    if sample["logprob_gap"] is not None:
        words.append(f"logprob gap {sample['logprob_gap']:.2g}")
    if sample["is_truncated"]:
        words.append("truncated")
    if sample["num_interruptions"]:
        words.append(several(sample["num_interruptions"], "interruption"))
    words.append(f"group {sample['group_id']} sample {sample['sample_index']}, prompt {sample['prompt_id']}")
    return harmless(", ".join(words).replace("\n", " "))


def sample_text(sample: ShownRollout, *, most: int | None = None) -> str:
    """Return a sample as text, `most` characters of each part; with a limit, only the last four parts."""
    lines = [headline(sample)]
    if sample["error"]:
        lines += _block("failed", _ended(sample["error"], most))
    if not sample["parts"]:
        for message in sample["messages"]:
            lines += _block(str(message.get("role", "?"))[:_LABEL], _end(str(message.get("content")), most))
    parts = sample["parts"] if most is None else sample["parts"][-4:]
    branch = 0
    for part in parts:
        if part["branch"] != branch:
            branch = part["branch"]
            lines.append(f"  branch {branch}")
        text = _ended(part["text"], most) if part["is_sampled"] else _end(part["text"], most)
        label = "prompt" if part is sample["parts"][0] else "context"
        lines += _block("model" if part["is_sampled"] else label, text)
    if "answer" in sample:
        lines += _block("answer", _end(sample["answer"], most))
    return "\n".join(lines)


def _block(label: str, text: str) -> Iterator[str]:
    """Add a margin, so that a text cannot imitate our lines."""
    for line in harmless(text.replace("\r\n", "\n")).split("\n"):
        yield f"{harmless(label):>{_LABEL}} | {line}"
        label = ""


def _end(text: str, most: int | None) -> str:
    return text if most is None or len(text) <= most else f"...{text[-most:]}"


def _ended(text: str, most: int | None) -> str:
    """Keep beginning and end."""
    if most is None or len(text) <= most:
        return text
    return f"{text[: most - most // 3]} ... {text[-(most // 3) :]}"


def render_samples(
    run_dir: Path,
    problems: list[str],
    *,
    as_json: bool,
    step: int | None = None,
    group: int | None = None,
    kinds: Sequence[str] = (),
) -> str:
    """Return the samples of a step or group, else the newest, for `asyncrl inspect`. Raises ConfigError if
    there are none.
    """
    newest = None if (step, group) != (None, None) else NEWEST_JSON if as_json else NEWEST
    found = read_samples(run_dir, problems, step, group=group, kinds=kinds, newest=newest)
    if as_json:
        return json.dumps({"run_dir": str(run_dir), "samples": found, "problems": problems})
    what = " or ".join(kinds) + " sample" if kinds else "sample"
    if not found and newest is None:
        named = [f"step {step}"] * (step is not None) + [f"group {group}"] * (group is not None)
        raise ConfigError(
            f"{run_dir} has no {what} of {' and '.join(named)}",
            rule="observe.samples_per_step rollouts of a step are written, of a very long run of fewer steps",
            way_out=f"take another; `asyncrl inspect {run_dir} --samples` shows the newest.",
        )
    texts = [sample_text(sample) for sample in found] or [f"{run_dir} has no {what} so far"]
    if newest == len(found):
        texts.insert(0, f"the newest {newest}; --step N and --group N show others:")
    return "\n\n".join([*texts, *(f"problem: {harmless(problem)}" for problem in problems)])
