"""A page as asyncrl/observe/page/shape.py has it, with something of everything that a page can show."""

from __future__ import annotations

import math
import random
from typing import Any

from asyncrl.observe.page.shape import Curve, Page, RunView, Timeline

from asyncrl.observe.samples import SampleKind, ShownRollout

HOSTILE = "</script><script>window.wasHostile = 1</script><img src=x onerror='window.wasHostile = 1'>\"&lt;"
"""What a model may write."""
GAUGES = {
    "reward/mean": {"unit": "", "meaning": "mean reward of the batch's rollouts"},
    "sample/staleness_mean": {"unit": "versions", "meaning": "age of a rollout's oldest token, mean"},
    "sample/staleness_max": {"unit": "versions", "meaning": "the largest: never above buffer.max_staleness"},
    "policy/grad_norm": {"unit": "", "meaning": "norm of the gradient before it is clipped"},
    "sample/length_mean": {"unit": "tokens", "meaning": "sampled tokens of a rollout"},
    "reward/std": {"unit": "", "meaning": "standard deviation of those rewards"},
    "policy/logprob_gap_mean": {"unit": "nats", "meaning": "engine to trainer, fresh tokens"},
    "policy/clip_fraction": {"unit": "0..1", "meaning": "tokens whose gradient the loss clipped"},
    "policy/entropy": {"unit": "nats", "meaning": "entropy of the policy, mean over the tokens in the loss"},
    "policy/loss": {"unit": "", "meaning": "loss of the batch"},
    "perf/tokens_per_s": {"unit": "tokens/s", "meaning": "trained tokens over perf/step_s"},
    "perf/host_memory_bytes": {"unit": "bytes", "meaning": "peak resident memory since the start, all ranks"},
    "sample/truncated_fraction": {"unit": "0..1", "meaning": "rollouts cut at rollout.max_tokens"},
}
PARTS = ("training", "waiting for generation", "waiting for stragglers", "waiting for publishing", "other")


def make_run(name: str = "quickstart", num_steps: int = 120, seed: int = 0) -> RunView:
    """A run of so many steps that learns, waits, fails a little and was restarted once."""
    chance = random.Random(seed)
    steps = [float(step) for step in range(1, num_steps + 1)]
    times = [1.2 * step + 4.0 + (25.0 if step > num_steps * 0.6 else 0.0) for step in steps]
    rewards = [1 / (1 + math.exp(3 - 7 * s / max(1, num_steps))) + chance.uniform(-0.06, 0.06) for s in steps]
    ages = [1.2 + 0.5 * math.sin(step / 9) for step in steps]
    curves: dict[str, Curve] = {
        "reward/mean": {
            "mean": list(rewards),
            "low": [reward - 0.08 for reward in rewards],
            "high": [reward + 0.08 for reward in rewards],
        },
        "sample/staleness_mean": {"mean": list(ages)},
        "sample/staleness_max": {"mean": [float(min(4, math.ceil(age + chance.random()))) for age in ages]},
        "policy/entropy": {"mean": [2.2 - 1.4 * s / max(1, num_steps) for s in steps]},
        "policy/grad_norm": {"mean": [chance.uniform(0.2, 2.0) for _ in steps]},
        "sample/length_mean": {"mean": [14.0 + 3 * math.sin(s / 20) for s in steps]},
        "reward/std": {"mean": [0.3 - 0.002 * s for s in steps]},
        "policy/logprob_gap_mean": {"mean": [4e-7 if step % 3 == 0 else None for step in range(num_steps)]},
        "policy/clip_fraction": {"mean": [chance.uniform(0, 0.2) for _ in steps]},
        "policy/loss": {
            "mean": [None if step % 17 == 3 else chance.gauss(0, 0.1) for step in range(num_steps)]
        },
        "perf/tokens_per_s": {"mean": [chance.uniform(9e3, 16e3) for _ in steps]},
        "perf/host_memory_bytes": {"mean": [4.5e8 + 1e5 * s for s in steps]},
        "sample/truncated_fraction": {"mean": [chance.random() / 4 for _ in steps]},
    }
    weights = (0.5, 0.3, 0.15, 0.05, 0.2)
    parts = {
        part: [weight * chance.uniform(0.6, 1.4) for _ in steps]
        for part, weight in zip(PARTS, weights, strict=True)
    }
    in_all = {part: sum(values) for part, values in parts.items()}
    whole = sum(in_all.values()) or 1.0
    return {
        "name": name,
        "run_dir": f"runs/{name}",
        "state": "done",
        "why": f"all {num_steps} steps are done",
        "started_s": 1_790_000_000.0 + seed,
        "num_steps": num_steps,
        "max_staleness": 4,
        "verdict": {
            "ended": "",
            "headline": "Learned: reward rose from 0.081 to 0.944 ± 0.010 and is still rising.",
            "learning": ["From start to end: entropy 2.2 to 0.8, tokens a rollout 14 to 15."],
            "health": ["18% of the answers contain special tokens such as <|system|>: read the samples."],
            "speed": [
                "Generation held the run back: the trainer waited 38% of the time.",
                "Raise rollout.num_engines (now 1), or buffer.look_ahead (now 2).",
                "on_overdue=mask: 1.3% of the tokens were masked.",
            ],
            "reward_first": 0.081,
            "reward_last": 0.944,
            "reward_noise": 0.01,
            "num_recent": 12,
            "trend": "rising",
        },
        "window": 12,
        "tiles": [
            {"label": "steps", "value": f"{num_steps}", "note": f"of {num_steps}, 1.41 s each"},
            {"label": "time", "value": "2 min 52 s", "note": "one restart"},
            {"label": "staleness", "value": "1.4 versions", "note": "at most 3, bound 4"},
            {"label": "trained tokens a second", "value": "12,480", "note": "waits included"},
            {"label": "failed rollouts", "value": "7", "note": "of 1,927 (0.4%)"},
        ],
        "step": steps,
        "time_s": times,
        "curves": curves,
        "step_times": {part: list(values) for part, values in parts.items()},
        "evaluations": [
            {
                "policy_version": version,
                "time_s": times[min(version, num_steps - 1)],
                "eval/reward_mean": rewards[min(version, num_steps - 1)] - 0.04,
                "eval/standard_error": 0.03,
                "eval/length_mean": 14.2,
                "eval/seconds": 3.1,
            }
            for version in range(0, num_steps, max(1, num_steps // 5))
        ],
        "gauges": dict(GAUGES),
        "shares": [
            {"name": part, "seconds": in_all[part], "fraction": in_all[part] / whole} for part in PARTS
        ],
        "timeline": make_timeline(times, chance),
        "samples": make_samples(num_steps, chance),
        "failures": [
            {
                "cause": "RewardFailure",
                "count": 5,
                "example": "the reward function raised ValueError: 'x = '",
            },
            {"cause": "RolloutTimeout", "count": 2, "example": "g17/r3 is still in turn 2 after 600.0 s"},
        ],
        "warnings": ["reward/std was 0 in 3 of the last 20 steps: such groups teach nothing."],
        "settings": [
            {"key": "seed", "value": str(seed), "default": "0", "differs": seed != 0},
            {"key": "model.path", "value": "models/tiny", "default": None, "differs": True},
            {"key": "buffer.max_staleness", "value": "4", "default": "1", "differs": True},
            {"key": "buffer.look_ahead", "value": "2", "default": "auto", "differs": True},
            {"key": "trainer.learning_rate", "value": "0.001", "default": "1e-06", "differs": True},
            {"key": "rollout.max_tokens", "value": "512", "default": "512", "differs": False},
            {"key": "rollout.temperature", "value": "1.0", "default": "1.0", "differs": False},
        ],
        "problems": [],
    }


def make_timeline(times: list[float], chance: random.Random) -> Timeline:
    lanes = ["trainer", "weight sync", "engine-0", "engine-1", "checkpoints", "restarts"]
    kinds = [
        {"name": "step", "meaning": "an optimizer step"},
        {"name": "wait for generation", "meaning": "the trainer waited for rollouts"},
        {"name": "wait for stragglers", "meaning": "the trainer waited for groups that would become too old"},
        {"name": "push", "meaning": "new weights on their way to the engines"},
        {"name": "pause", "meaning": "the engine did not decode, as it took new weights"},
        {"name": "checkpoint", "meaning": "the state was written"},
        {"name": "restart", "meaning": "a process was started again"},
    ]
    spans: list[tuple[int, int, float, float, str]] = []
    for step, time_s in enumerate(times, start=1):
        cause = 2 if step % 9 == 4 else 1
        spans.append((0, cause, time_s - 1.1, time_s - 0.5, f"before step {step}"))
        spans.append((0, 0, time_s - 0.5, time_s, f"step {step}"))
        spans.append((1, 3, time_s, time_s + 0.3, f"version {step}"))
        for engine in (2, 3):
            spans.append((engine, 4, time_s + 0.2, time_s + 0.28, f"takes version {step}"))
        if step % 25 == 24:
            spans.append((4, 5, time_s, time_s + 0.9, f"checkpoint of step {step}"))
    if len(times) > 10:
        spans.append((5, 6, times[len(times) * 6 // 10], times[len(times) * 6 // 10] + 20, "engine-1 died"))
        spans.append((5, 6, times[-1], times[-1], "an instant"))
    end_s = times[-1] if times else 0.0
    busy = {
        f"engine-{engine}": [(at / 2, float(chance.randint(2, 8))) for at in range(int(end_s * 2))]
        for engine in (0, 1)
    }
    return {
        "start_s": 1_790_000_000.0,
        "lanes": lanes,
        "kinds": kinds,
        "spans": spans,
        "slots": busy,
        "num_slots": 16,
        "is_thinned": False,
    }


def make_samples(num_steps: int, chance: random.Random) -> list[ShownRollout]:
    kinds: tuple[SampleKind, ...] = ("best", "worst", "random")
    shown = [
        make_sample(step, kind, chance) for step in range(1, num_steps + 1, 3) for kind in kinds
    ]  # of a long run more than a list shows at once
    for step in range(2, num_steps + 1, 40):
        shown.append(
            {
                **make_sample(step, "failed", chance),
                "reward": None,
                "parts": [],
                "error": "the reward function raised ValueError: no number in 'x = '",
            }
        )
    return shown


def make_sample(step: int, kind: SampleKind, chance: random.Random, text: str = HOSTILE) -> ShownRollout:
    """A rollout of two turns with a tool's reply between, sampled under up to three versions."""
    question = f"What is {chance.randint(2, 99)} times {chance.randint(2, 99)}? Think, then use the tool."
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    thinking = f"Let me think. {text} I ask the tool: <tool>multiply</tool>"
    reply = "<|im_end|>\n<|im_start|>tool\n1462<|im_end|>\n"
    answer = "So the answer is 1462, a number that I am rather sure about."
    reward = {"best": 1.0, "worst": 0.0}.get(kind, round(chance.random(), 3))
    return {
        "step": step,
        "kind": kind,
        "group_id": step * 8 + 3,
        "sample_index": 1,
        "prompt_id": f"train/{step}",
        "task": "arithmetic" if step % 2 else "tools",
        "messages": [
            {"role": "system", "content": "You are careful."},
            {"role": "user", "content": question},
        ],
        "answer": "1462",
        "reward": reward,
        "metrics": {"correct": reward, "format": 0.5, "tool_calls": 1.0},
        "num_sampled": 40,
        "versions": [max(0, step - 3), max(0, step - 1)],
        "staleness": 1 if step else 0,
        "logprob_gap": 0.0021,
        "is_truncated": kind == "worst",
        "num_interruptions": step % 3,
        "parts": [
            {"branch": 0, "is_sampled": index % 2 == 1, "text": part}
            for index, part in enumerate((prompt, thinking, reply, answer))
        ],
        "error": None,
    }


def make_shown_page(*runs: RunView, is_live: bool = False) -> Page:
    """The page of these runs, or of one that make_run makes."""
    shown = list(runs) or [make_run()]
    keys: dict[str, Any] = {"seed": [str(index) for index, _ in enumerate(shown)]}
    return {
        "asyncrl": "0.0.0",
        "made_s": 1_790_000_200.0,
        "is_live": is_live,
        "runs": shown,
        "differences": [{"key": key, "values": values} for key, values in keys.items() if len(shown) > 1],
    }
