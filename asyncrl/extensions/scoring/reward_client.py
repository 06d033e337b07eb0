"""Client of a reward model: a number for a completion (`task.reward.model`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.base.errors import ConfigError, EngineLost
from asyncrl.base.http import Caller
from asyncrl.config import TaskConfig
from asyncrl.engines.role_client import RoleClient, least_busy
from asyncrl.extensions.scoring.judge import question_of
from asyncrl.extensions.scoring.reward_model_config import (
    REWARD_PLACES,
    RewardModelConfig,
)
from asyncrl.extensions.scoring.scoring_api import RewardRequest, RewardResponse
from asyncrl.messages.records import (
    Prompt,
    Reward,
)
from asyncrl.tasks.rewards import (
    Completions,
)
from asyncrl.tasks.scorer import AskedScorer, ClientsOf

KEY = "task.reward.model"
TWO_LABELS = {"0": "LABEL_0", "1": "LABEL_1"}
"""Labels of a config.json that names none."""


def find_label(config: RewardModelConfig, architecture: Mapping[str, Any]) -> int:
    """Return the number of the label that counts, by the model's config.json. Raises
    ConfigError if the model does not classify sequences, or the label is not one.
    """
    kinds = architecture.get("architectures") or ["a model of unknown kind"]
    if not kinds[0].endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{KEY}.path={config.path} is {kinds[0]}",
            rule="a reward model is a sequence classification model",
            way_out="name such a model; a model that answers in words is a judge (docs/rewards.md).",
        )
    names: Mapping[str, str] = architecture.get("id2label") or TWO_LABELS
    wanted = str(config.label)
    found = [int(key) for key, name in names.items() if wanted in (key, name)]
    if config.label is None and len(names) == 1:
        return 0
    if len(found) != 1:
        given = "none" if config.label is None else config.label
        known = ", ".join(names.values())
        raise ConfigError(
            f"{KEY}.label={given}: {config.path} has {len(names)} labels: {known}",
            way_out=f"set {KEY}.label to one of them, or to its number.",
        )
    return found[0]


class RewardModelClient(RoleClient):
    def __init__(
        self,
        caller: Caller,
        config: RewardModelConfig,
        *,
        on_lost: Callable[[EngineLost], None] | None = None,
    ) -> None:
        super().__init__(caller, places=REWARD_PLACES, on_lost=on_lost)
        self._config = config
        self._num_texts = 0
        self._num_tokens = 0

    def gauges(self) -> dict[str, float]:
        return {"reward/texts": self._num_texts, "reward/tokens": self._num_tokens}

    async def score(self, prompt: Prompt, completion: str) -> float:
        """Return the scaled logit. Raises RequestRefused (data) or EngineError."""
        request = RewardRequest(
            messages=[dict(message) for message in prompt.messages],
            question=question_of(prompt),
            completion=completion,
        )
        answer = await self.call("/reward", request, RewardResponse)
        self._num_texts += 1
        self._num_tokens += answer.num_tokens
        return (answer.score - self._config.mean) / self._config.std


class ModelScorer(AskedScorer):
    """Asks the reward model of the run."""

    def __init__(self, clients: Sequence[RewardModelClient]) -> None:
        self._clients = clients

    async def __call__(self, prompt: Prompt, given: str | Completions) -> Reward:
        assert isinstance(given, str), "a reward model reads single completions"
        return await least_busy(self._clients).score(prompt, given)


def ask_model(task: TaskConfig, clients_of: ClientsOf) -> ModelScorer | None:
    clients = clients_of(RewardModelClient)
    return ModelScorer(clients) if clients else None
