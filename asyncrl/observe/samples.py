"""samples.jsonl: what the model said, a few rollouts a step, as text for people. One JSON object a line.

The record of what was trained on is trained.jsonl; this file is for eyes: bounded, and long texts are cut.
Text is hostile: it is what a model wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from asyncrl.observe.recorder import SAMPLES_FILE, lines_of, parse_line, tell

SampleKind = Literal["best", "worst", "random", "failed"]
"""Why a rollout was taken: by its reward among those of its batch; by chance (seeded); as it failed."""


class ShownTokens(TypedDict):
    """Neighbouring tokens of a branch that are all sampled in it, or all not (prompt, tool replies).

    `text` is decoded from all tokens together. Of sampled ones, with one entry a token: `pieces` (text that
    a token adds; joined they are `text`), `logprobs` (behaviour, nats), `versions` (policy_version) and
    `in_loss` (false: older than the bound, masked). `cut`: tokens that are left out at its end.
    """

    is_sampled: bool
    text: str
    pieces: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]
    versions: NotRequired[list[int]]
    in_loss: NotRequired[list[bool]]
    cut: NotRequired[int]


class ShownBranch(TypedDict):
    """One branch of a rollout. `parent` and `num_shared`: the branch that it forks from, and how many of its
    first tokens they share; None and 0 for the first.
    """

    branch: int
    parent: int | None
    num_shared: int
    num_tokens: int
    stretches: list[ShownTokens]


class ShownRollout(TypedDict):
    """A rollout as people read it.

    `step`: the batch that it was trained in, or, of a failed one, the batch that was next. `task`: name of
    its task, where a run has several. `metrics`: the parts of its reward, and what else task and harness
    report. `spans`: [start, end, version] over all sampled tokens of all branches, in order. `staleness`: of
    its oldest token in the loss. `logprob_gap`: mean of |engine - trainer| in nats over its fresh tokens;
    None if it has none. `error`: why it failed.
    """

    step: int
    kind: SampleKind
    group_id: int
    sample_index: int
    prompt_id: str
    task: NotRequired[str]
    messages: list[dict[str, Any]]
    answer: NotRequired[str]
    reward: float | None
    metrics: dict[str, float]
    num_sampled: int
    spans: list[tuple[int, int, int]]
    staleness: int | None
    logprob_gap: float | None
    is_truncated: bool
    num_interruptions: int
    branches: list[ShownBranch]
    error: str | None


_CHECK = TypeAdapter(ShownRollout)


def read_samples(run_dir: Path, problems: list[str], step: int | None = None) -> list[ShownRollout]:
    """The samples of a run, or of one of its steps, in the order of the file; lines that are none are left
    out and told in `problems`.
    """
    path, found = run_dir / SAMPLES_FILE, list[ShownRollout]()
    for number, (_, line) in enumerate(lines_of(path, problems, parse_line), start=1):
        if step is not None and line.get("step") != step:
            continue
        try:
            found.append(_CHECK.validate_python(line))
        except ValidationError as error:
            tell(
                problems,
                f"{path.name} object {number} is no sample and is left out: {error.errors()[0]['loc']}",
            )
    return found
