"""Run rollouts; the one place where a failure becomes data. Knows no server, no weights."""

from asyncrl.producers.producers import Producers, ProducersStats, Spawn
from asyncrl.producers.rollout import FailedRollout, Generator, RolloutAttempt, RolloutRunner
from asyncrl.producers.seeds import derive_seed
from asyncrl.producers.single_turn import SingleTurn
from asyncrl.producers.tokenizer import HFChatTokenizer

__all__ = [
    "FailedRollout",
    "Generator",
    "HFChatTokenizer",
    "Producers",
    "ProducersStats",
    "RolloutAttempt",
    "RolloutRunner",
    "SingleTurn",
    "Spawn",
    "derive_seed",
]
