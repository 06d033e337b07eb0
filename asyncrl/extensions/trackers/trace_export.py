"""`asyncrl export --traces`: write the rollouts of a journal for other trainers and for
trace viewers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import whole_folder
from asyncrl.extensions.trackers.traces import TracedRun, otlp_json
from asyncrl.job.agent_runtime import model_name
from asyncrl.job.run_export import check_new_folder, read_finished
from asyncrl.messages.records import PolicyCall, Rollout, Trajectory
from asyncrl.observe.run_dir import ID_FILE, read_config

TRAINING_FILE = "training_traces.jsonl"
"""A rollout a line; `trace` is a TrainingTrace of OpenEnv."""
SPANS_FILE = "spans.otlp.jsonl"
"""A rollout a line, as OTLP's JSON."""


def export_traces(
    run_dir: Path, out: Path, *, tell: Callable[[str], None] = print
) -> dict[str, object]:
    """Write TRAINING_FILE and SPANS_FILE into the new folder `out`. Raises ConfigError,
    JournalError.
    """
    config = read_config(run_dir)
    out = out.expanduser().resolve()
    check_new_folder(out, run_dir)
    num_rollouts = 0
    run_id = (run_dir / ID_FILE).read_text(encoding="utf-8").strip()
    run = TracedRun(run_id, run_dir.resolve().name, model_name(config))
    with whole_folder(out) as unfinished:
        unfinished.mkdir()
        with (
            (unfinished / TRAINING_FILE).open("w", encoding="utf-8") as training,
            (unfinished / SPANS_FILE).open("w", encoding="utf-8") as spans,
        ):
            for group_id, prompt_id, _, min_version, rollouts in read_finished(
                run_dir, tell
            ):
                for index, rollout in rollouts.items():
                    line = {
                        "group_id": group_id,
                        "sample_index": index,
                        "prompt_id": prompt_id,
                        "reward": float(rollout[0].reward),
                        "trace": training_trace(group_id, rollout, min_version),
                    }
                    trace = run.spans(group_id, prompt_id, index, rollout)
                    training.write(json.dumps(line) + "\n")
                    spans.write(json.dumps(otlp_json(trace)) + "\n")
                    num_rollouts += 1
        if not num_rollouts:
            raise ConfigError(
                f"{run_dir} has the tokens of no finished group",
                way_out="set journal.keep=all in the run.",
            )
    tell(f"{num_rollouts} rollouts: {out}")
    return {"kind": "traces", "num_rollouts": num_rollouts, "out": str(out)}


def training_trace(
    group_id: int, rollout: Rollout, min_version: int = 0
) -> dict[str, object]:
    """Return a rollout as OpenEnv's TrainingTrace (openenv 0.10, schema version 1): a
    turn for each call that was sampled from the run's distribution.

    The mask covers prompt and completion; 1: in the loss, so tokens older than
    `min_version` have 0.
    """
    turns = []
    for branch in rollout:
        versions = branch.tokens.versions
        mask = (versions >= min_version) & branch.loss_mask
        for call in branch.calls:
            # An untrained answer is context here: its logprobs are not kept.
            if branch.loss_mask[call.start : call.end].all():
                turns.append(_turn(group_id, branch, call, mask))
    return {"schema_version": 1, "turns": turns}


def _turn(
    group_id: int, branch: Trajectory, call: PolicyCall, mask: npt.NDArray[np.bool_]
) -> dict[str, object]:
    ids = branch.token_ids.tolist()
    sampled = slice(call.start, call.end)
    # The log_softmax of a sure token may round to a little above 0, which readers
    # refuse.
    logprobs = np.minimum(branch.tokens.behaviour_logprobs[sampled], 0.0)
    metadata: dict[str, object] = {
        "branch": branch.branch,
        "finish_reason": call.finish_reason,
        "policy_versions": branch.tokens.versions[sampled].tolist(),
    }
    if call.agent:
        metadata["agent"] = call.agent
    for credit in branch.credits:
        if credit.start <= call.start < credit.end:
            metadata["reward"] = credit.reward
    return {
        "node_id": f"g{group_id}/r{branch.sample_index}/{call.name}",
        "prompt_token_ids": ids[: call.start],
        "completion_token_ids": ids[sampled],
        "per_token_logps": logprobs.tolist(),
        "loss_mask": [0] * call.start + mask[sampled].astype(int).tolist(),
        "request": {},
        "response": {},
        "metadata": metadata,
    }
