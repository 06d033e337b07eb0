"""Write rollouts as JSON lines for `asyncrl serve gateway --record FILE`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from asyncrl.base.errors import ConfigError, RoomError
from asyncrl.messages.records import Prompt, Rollout, Trajectory
from asyncrl.rollouts.tokenizer import HFChatTokenizer


class RolloutRecorder:
    """Append one JSON object per rollout to a file: prompt_id, messages, answer, info, sample_index, reward
    and branches with text, token_ids, loss_mask (1: sampled), logprobs in nats and version_spans [start, end,
    version].
    """

    def __init__(self, tokenizer: HFChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._file: TextIO | None = None
        self._samples = Counter[str]()
        self.num_recorded = 0

    def open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to {path}: {error}", way_out="name another file.") from error

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
        try:
            self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            what = f"cannot write {self._file.name}: {error}"
            raise RoomError("recording", what, way_out="free space, or name another file.") from error
        self.num_recorded += 1

    def _branch(self, branch: Trajectory) -> dict[str, Any]:
        token_ids = branch.token_ids.tolist()
        return {
            "text": self._tokenizer.decode(token_ids, skip_special_tokens=False),
            "token_ids": token_ids,
            "loss_mask": branch.loss_mask.astype(int).tolist(),
            "logprobs": branch.behaviour_logprobs.tolist(),
            "version_spans": [[span.start, span.end, span.version] for span in branch.version_spans],
        }

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
