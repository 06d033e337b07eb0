"""Scores a held-out task at fixed versions, beside training. Knows no buffer, no trainer: nothing of it is trained on."""

from asyncrl.evaluation.evaluation import Evaluation, EvaluationStats
from asyncrl.evaluation.evaluator import Evaluator, RunAgent
from asyncrl.evaluation.holding import FileHold
from asyncrl.evaluation.result import EvalResult
from asyncrl.evaluation.schedule import Schedule

__all__ = ["EvalResult", "Evaluation", "EvaluationStats", "Evaluator", "FileHold", "RunAgent", "Schedule"]
