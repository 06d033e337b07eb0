"""Samples as plain text for people: on the console, in `asyncrl inspect --samples` and in TensorBoard."""

from __future__ import annotations

import itertools
import json
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.observe.recorder import SAMPLES_FILE
from asyncrl.observe.run_numbers import plain, several
from asyncrl.observe.samples import ShownRollout, ShownTokens, read_samples

NEWEST, NEWEST_JSON = 10, 1000
"""Samples that are listed where no step and no group is asked for; as JSON."""
_LABEL = 12


def harmless(text: str) -> str:
    """Text with each control character but the line end written out, as Python's escapes, so that a terminal
    shows it and does nothing else.
    """
    return "".join(one if one in "\n " or _is_seen(one) else _written(one) for one in text)


def _is_seen(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode()


def headline(sample: ShownRollout) -> str:
    """What it is, in a line."""
    versions = sorted({version for *_, version in sample["spans"]})
    reward = "no reward" if sample["reward"] is None else f"reward {plain(sample['reward'])}"
    what = "failed rollout" if sample["kind"] == "failed" else f"{sample['kind']} sample"
    words = [f"{what} of step {sample['step']}: {reward}"]
    words += [f"{name} {plain(value)}" for name, value in sample["metrics"].items()]
    if versions:
        is_one = len(versions) == 1
        words.append(f"version {versions[0]}" if is_one else f"versions {versions[0]}..{versions[-1]}")
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
    """All of it. `most`: so many characters of each stretch, and of several stretches the first and the
    last ones.
    """
    lines = [headline(sample)]
    if sample["error"]:
        lines += _block("failed", _ended(sample["error"], most))
    if not sample["branches"]:
        for message in sample["messages"]:
            lines += _block(str(message.get("role", "?"))[:_LABEL], _end(str(message.get("content")), most))
    for branch in sample["branches"]:
        if branch["branch"]:
            origin = "begins anew"
            if branch["parent"] is not None:
                origin = (
                    f"forks from branch {branch['parent']} after {several(branch['num_shared'], 'token')}"
                )
            lines.append(f"  branch {branch['branch']} {origin}")
        blocks = [
            list(_stretch(one, is_first=n == 0, most=most)) for n, one in enumerate(branch["stretches"])
        ]
        if most is not None and len(blocks) > 4:
            blocks = [*blocks[:2], [f"{'':>{_LABEL}} ... {len(blocks) - 4} parts ..."], *blocks[-2:]]
        lines += itertools.chain(*blocks)
        for start, end, reward in branch.get("credits", ()) if most is None else ():
            lines.append(f"{'credit':>{_LABEL}} | tokens {start}..{end - 1}: reward {plain(reward)}")
        if most is not None:
            break
    if (more := len(sample["branches"]) - 1) > 0 and most is not None:
        lines.append(f"  branches that are not shown here: {more}")
    if num := sample.get("cut_branches", 0):
        lines.append(f"  branches that are not in {SAMPLES_FILE}: {num}")
    if "answer" in sample:
        lines += _block("answer", _end(sample["answer"], most))
    return "\n".join(lines)


def _stretch(stretch: ShownTokens, *, is_first: bool, most: int | None) -> Iterator[str]:
    """What was sampled under each version; of what was not, the end counts."""
    if not stretch["is_sampled"]:
        yield from _block("prompt" if is_first else "context", _end(stretch["text"], most))
    elif most is not None:
        versions = sorted(set(stretch.get("versions", ())))
        label = f"model v{versions[0]}" if len(versions) == 1 else "model"
        yield from _block(label, _ended(stretch["text"], most))
    else:
        tokens = zip(stretch["versions"], stretch["in_loss"], stretch["pieces"], strict=True)
        for (version, in_loss), run in itertools.groupby(tokens, key=lambda token: token[:2]):
            masked = "" if in_loss else "*"
            yield from _block(f"model v{version}{masked}", "".join(piece for *_, piece in run))
    if cut := stretch.get("cut"):
        yield f"{'':>{_LABEL}} ... {several(cut, 'token')} left out ..."


def _block(label: str, text: str) -> Iterator[str]:
    """Lines with a margin, so that no line of the text can be taken for one of ours."""
    for line in harmless(text.replace("\r\n", "\n")).split("\n"):
        yield f"{harmless(label):>{_LABEL}} | {line}"
        label = ""


def _end(text: str, most: int | None) -> str:
    return text if most is None or len(text) <= most else f"...{text[-most:]}"


def _ended(text: str, most: int | None) -> str:
    """Its beginning and its end."""
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
    """`asyncrl inspect --samples`: those of a step or group, else the newest. Raises ConfigError if there are
    none.
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
    stretches = (one for sample in found for branch in sample["branches"] for one in branch["stretches"])
    if not all(all(one.get("in_loss", ())) for one in stretches):
        texts.append("*: not in the loss, as too old or of a failed rollout")
    return "\n\n".join([*texts, *(f"problem: {harmless(problem)}" for problem in problems)])
