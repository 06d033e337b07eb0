"""`asyncrl export --samples`: write good rollouts as demonstrations for `asyncrl sft`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from asyncrl.base.errors import ConfigError
from asyncrl.base.files import write_whole
from asyncrl.job.run_export import find_trained_model, read_finished
from asyncrl.messages.worker_api import answer_text
from asyncrl.observe.run_dir import read_config
from asyncrl.rollouts.tokenizer import HFChatTokenizer


def export_samples(
    run_dir: Path,
    out: Path,
    *,
    min_reward: float,
    tell: Callable[[str], None] = print,
) -> dict[str, object]:
    """Write the rollouts with at least `min_reward` to the new file `out`, a line each:
    messages, reward, group_id. Raises ConfigError, JournalError.
    """
    config = read_config(run_dir)
    if config.trains_agent:
        raise ConfigError(
            f"{run_dir} trains an agent, whose conversations are recorded as tokens",
            rule="only single-turn rollouts are exported as messages",
            way_out="let the agent write its own messages.",
        )
    out = out.expanduser()
    if out.exists():
        raise ConfigError(f"{out} exists", way_out="choose another file.")
    folder, _ = find_trained_model(run_dir, config)
    tokenizer = HFChatTokenizer(folder, chat_template=config.model.chat_template)
    lines = dict[str, None]()
    for group in read_finished(run_dir, tell):
        for (rollout,) in group.rollouts.values():  # a single turn has one branch
            ids = rollout.token_ids[rollout.loss_mask].tolist()
            # The template writes the end-of-turn token.
            text = answer_text(tokenizer, ids, shows_special=True)
            is_good = rollout.reward >= min_reward and not rollout.is_truncated
            # supervised fine-tuning refuses an empty answer
            if not is_good or not text.strip():
                continue
            answer = {"role": "assistant", "content": text}
            row: dict[str, object] = {
                "messages": [*(group.messages or ()), answer],
                "reward": rollout.reward,
                "group_id": group.group_id,
            }
            lines[json.dumps(row)] = None  # equal answers of a group count once
    if not lines:
        raise ConfigError(
            f"{run_dir} has no whole rollout with a reward of at least {min_reward}",
            way_out="lower --min-reward, or set journal.keep=all in the run.",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, "".join(f"{line}\n" for line in lines))
    tell(f"{len(lines)} rollouts: {out}")
    return {"kind": "samples", "num_rollouts": len(lines), "out": str(out)}
