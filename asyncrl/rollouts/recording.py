"""Write rollouts as JSON lines for `asyncrl serve gateway --record FILE`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Self, TextIO

from asyncrl.base.errors import ConfigError
from asyncrl.messages.records import Prompt, Rollout, Trajectory
from asyncrl.rollouts.tokenizer import HFChatTokenizer


class RolloutRecorder:
    """Append one JSON object per rollout to a file: prompt_id, messages, answer, info, sample_index, reward
    and branches with text, token_ids, loss_mask (1: sampled), logprobs in nats and version_spans [start, end,
    version].
    """

    def __init__(self, tokenizer: HFChatTokenizer, path: Path | None) -> None:
        """Write nothing without a path. Raises ConfigError if the file cannot be written."""
        self.tokenizer = tokenizer
        self._file: TextIO | None = None
        self._samples = Counter[str]()
        self.num_recorded = 0
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error}", way_out="name another file.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def next_sample(self, prompt_id: str) -> int:
        return self._samples[prompt_id]

    def record(self, prompt: Prompt, reward: float | None, rollout: Rollout) -> None:
        self._samples[prompt.prompt_id] += 1
        if self._file is None:
            return
        line = {
            "prompt_id": prompt.prompt_id,
            "messages": list(prompt.messages),
            "answer": prompt.answer,
            "info": dict(prompt.info),
            "sample_index": rollout[0].sample_index,
            "reward": reward,
            "branches": [self._branch(branch) for branch in rollout],
        }
        self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        self._file.flush()
        self.num_recorded += 1

    def _branch(self, branch: Trajectory) -> dict[str, Any]:
        token_ids = branch.token_ids.tolist()
        return {
            "text": self.tokenizer.decode(token_ids, skip_special_tokens=False),
            "token_ids": token_ids,
            "loss_mask": branch.loss_mask.astype(int).tolist(),
            "logprobs": branch.behaviour_logprobs.tolist(),
            "version_spans": [[span.start, span.end, span.version] for span in branch.version_spans],
        }
