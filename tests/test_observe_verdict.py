from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import product
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pytest
from job_runs import environment
from launch_cases import load
from printed_texts import fields_named

from asyncrl.config import RunConfig
from asyncrl.observe import pace
from asyncrl.observe.metrics import GAUGES
from asyncrl.observe.run_numbers import Steps
from asyncrl.observe.verdict import Verdict, judge

WAIT = "buffer.on_overdue=wait"
RUN_DIR = Path("runs/my run")
NUM = 200

Column = float | Callable[[int], float]


def config(*overrides: str) -> RunConfig:
    """configs/quickstart.yaml with the numbers of the sentences below."""
    numbers = (
        "rollout.slots=64",
        "rollout.group_size=8",
        "trainer.learning_rate=1.5e-3",
        "algorithm.loss=ppo_clip",
    )
    return load("trainer.num_groups=4", "buffer.max_staleness=4", *numbers, *overrides)


def steps(text: str, num: int = 20) -> list[dict[str, float]]:
    """Steps of 1 s each, with metrics like `train_s=0.4 engine/busy_slots=64`; perf/ is
    omitted.
    """
    parts = dict(part.split("=") for part in f"step_s=1 {text}".split())
    metrics = {
        name if "/" in name else f"perf/{name}": float(value)
        for name, value in parts.items()
    }
    return [
        {"step": n, "time_s": 10.0 + n, "reward/mean": n / num, **metrics}
        for n in range(1, num + 1)
    ]


def judged(num: int = NUM, *overrides: str, **columns: Column) -> Verdict:
    """The verdict of `num` steps of a second; a column is `reward_mean`, with _ for its
    first /.
    """
    healthy: dict[str, Column] = {
        "reward_mean": rising,
        "reward_std": 0.2,
        "policy_grad_norm": 0.5,
    }
    lines: list[dict[str, float]] = []
    for step in range(1, num + 1):
        line = {
            "step": step,
            "time_s": float(step),
            "perf/step_s": 1.0,
            "perf/train_s": 0.95,
        }
        for name, column in (healthy | columns).items():
            line[name.replace("_", "/", 1)] = (
                column(step) if callable(column) else column
            )
        lines.append(line)
    return judge(Steps(lines), config(*overrides), RUN_DIR)


def noise(step: int) -> float:
    return random.Random(step).gauss(0, 0.02)


def rising(step: int) -> float:
    return 0.1 + 0.8 * step / NUM + noise(step)


def flat(step: int) -> float:
    return 0.3 + noise(step)


# ---- did it learn?


def lost(step: int) -> float:
    return (0.9 if 80 < step < 120 else 0.1) + noise(step)


@pytest.mark.parametrize(
    ("columns", "headline"),
    [
        ({}, "Learned: reward rose from 0.1* to 0.8* ± 0.0*."),
        (
            {"reward_mean": lost},
            "Learned and lost it again: reward 0.1* at the start, 0.9* around step 110",
        ),
        (
            {"reward_mean": lambda step: 1 - rising(step)},
            "Got worse: reward fell from 0.8* to 0.1*",
        ),
        ({"reward_mean": math.nan}, "No step has a reward yet."),
    ],
)
def test_headline_states_whether_the_run_learned(
    columns: dict[str, Column], headline: str
) -> None:
    found = judged(NUM, **columns)
    at = -1
    for part in headline.split("*"):
        assert (at := found.headline.find(part, at + 1)) >= 0, found.headline


def test_a_short_run_is_not_judged() -> None:
    found = judged(19)
    assert found.headline.startswith("No clear gain yet: reward 0.1")
    assert found.headline.endswith("(19 steps).")
    assert found.speed == ("Too short to judge speed: 20 steps and 10 s are needed.",)
    assert judged(100, perf_step_s=0.05, perf_train_s=0.01).bottleneck == "unknown"


def test_a_rise_is_a_gain_from_50_steps_on() -> None:
    def rise(step: int) -> float:
        return 0.1 + step / 100

    few = judged(49, reward_mean=rise).headline
    assert few.startswith("No clear gain yet: reward rose from 0.1")
    assert few.endswith("but in fewer than 50 steps (49).")
    assert judged(50, reward_mean=rise).headline.startswith("Learned: reward rose")


# ---- what is wrong, and what only looks wrong

SENTENCES = {
    "not finite": "skipped because loss or gradient was not finite",
    "gap": "engines and trainer disagree by",
    "rate": "model was probably broken by trainer.learning_rate=",
    "kl": "model is held at its initial weights by algorithm.kl_coefficient=",
    "cut": "of the answers were cut off at a limit",
    "constant": "every answer earned",
    "equal": "of the groups all answers earned the same reward",
    "gradient": "gradient is 0 in the newest steps",
    "unmoved": "model hardly moved at trainer.learning_rate=",
    "special": "of the answers contain special tokens",
    "epochs": "no evaluation covers other prompts",
    "failed": "of the attempts of rollouts failed",
}


TABLE = tomllib.loads(Path(__file__).with_name("verdict_situations.toml").read_text())


def column(text: str) -> Column:
    """Return a column of verdict_situations.toml."""
    mean, _, error = text.partition("~")
    before, _, jump = text.partition("@")
    first, _, move = text.partition("..")
    if error:
        return lambda step: float(mean) + random.Random(step).gauss(0, float(error))
    if jump:
        start, _, later = jump.partition(":")
        return lambda step: float(later if step >= int(start) else before)
    if move:
        late, _, num = move.partition("/")
        rest = float(first) - float(late)
        return lambda step: float(late) + rest * math.exp(-step / float(num or 30))
    return float(text)


def columns(text: str) -> dict[str, Column]:
    found: dict[str, Column] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        found |= {name: column(value)} if value else columns(TABLE["metrics"][name])
    return found


def verdict_of(situation: dict[str, Any]) -> tuple[RunConfig, Verdict]:
    run = config(*situation.get("settings", "").split())
    table = columns(f"untrained {situation.get('metrics', '')}")
    lines = [
        {name: get(step) if callable(get) else get for name, get in table.items()}
        | {"step": step}
        for step in range(1, situation["steps"] + 1)
    ]
    return run, judge(Steps(lines), run, RUN_DIR)


@pytest.mark.parametrize("situation", TABLE["situation"], ids=itemgetter("name"))
def test_each_situation_has_its_one_right_sentence(situation: dict[str, Any]) -> None:
    run, verdict = verdict_of(situation)
    lines = [line[0].lower() + line[1:] for line in verdict.health]
    found = [kind for line in lines for kind in SENTENCES if SENTENCES[kind] in line]
    expected = re.findall("|".join(SENTENCES), situation.get("findings", ""))
    assert (found, len(lines)) == (expected, len(expected)), verdict
    assert verdict.headline.startswith(situation["headline"]), verdict.headline
    if expected:
        assert situation["advice"] in lines[0]
        first_is_a_reason = SENTENCES[expected[0]] in verdict.headline
        is_judged = not situation["headline"].startswith(("Too short", "Learned: "))
        assert first_is_a_reason == is_judged, verdict.headline
    for key, value in re.findall(r"(?:set|with) ([a-z._]+)=([\d.e+-]+)\.$", str(lines)):
        assert fields_named(key)
        assert 0 < float(value) < attrgetter(key)(run)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", ["trainer.learning_rate=0.2", "algorithm.kl_coefficient=50"]
)
def test_the_printed_advice_helps(tmp_path: Path, fault: str) -> None:
    def run(name: str, setting: str) -> dict[str, Any]:
        # At 0 the rewards are the same on a machine of any speed.
        options = ["trainer.num_steps=80", "rollout.group_size=8", setting]
        options.append("buffer.max_staleness=0")
        command = ["run", "configs/quickstart.yaml", *options, "observe.trackers=[]"]
        subprocess.run(
            [sys.executable, "-m", "asyncrl", *command, "--run-dir", tmp_path / name],
            check=True,
            cwd=Path(__file__).parents[1],
            env=environment(),
        )
        summary: dict[str, Any] = json.loads(
            (tmp_path / name / "summary.json").read_text()
        )
        return summary

    found = [run("ill", fault)]
    # Advice is a step toward a good value: KL coefficients of 0.6, then 0.2.
    while found[-1]["health"]:
        assert len(found) < 4, "the advice does not end"
        (advice,) = re.findall(r"(?:set|with) (\S+)\.$", found[-1]["health"][0])
        assert advice.partition("=")[0] == fault.partition("=")[0]
        found.append(run(f"better-{len(found)}", advice))
    rewards = [summary["reward"]["last"] for summary in found]
    assert rewards == sorted(rewards)
    assert rewards[-1] > rewards[0] + 0.03


def test_imitation_may_reach_a_low_entropy() -> None:
    """Without rewards, as in supervised fine-tuning."""
    table = [
        {"step": n, "time_s": n, "perf/step_s": 1.0, "policy/entropy": 2.0 / n**2}
        for n in range(1, 41)
    ]
    assert judge(Steps(table), config(), RUN_DIR).health == ()


# ---- how fast was it?

# A batch has 8 rollouts of 10 tokens on average.
TRAINER_BOUND = ["rollout.simulated.decode_step_s=0.002", "rollout.slots=16"]
ENGINE_BOUND = ["rollout.simulated.decode_step_s=0.1", "rollout.slots=4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "sleep_us", "bottleneck"),
    [(TRAINER_BOUND, "10000", "training"), (ENGINE_BOUND, "1", "generation")],
)
def test_the_pace_of_a_run_is_set_by_its_slow_side(
    settings: list[str], sleep_us: str, bottleneck: str, tmp_path: Path
) -> None:
    shape = ["trainer.num_groups=2", "rollout.group_size=4", "trainer.num_steps=30"]
    kind = ["launcher=sleeping", "rollout.engine=simulated"]
    lengths = ["rollout.simulated.mean_tokens=10", "rollout.simulated.sigma=0.2"]
    # The sleeping model has no logprobs.
    plain = ["algorithm.kl_coefficient=0", "observe.trackers=[]"]
    command = ["run", "configs/quickstart.yaml", *shape, *kind, *lengths, *plain]
    root = Path(__file__).parents[1]
    places = f"{root}/benchmarks:{root}:{root}/servers"
    subprocess.run(
        [sys.executable, "-m", "asyncrl", *command, *settings, "--run-dir", tmp_path],
        check=True,
        cwd=root,
        env=environment(PYTHONPATH=places, ASYNCRL_SLEEP_US=sleep_us),
    )
    lines = [*map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())]
    verdict = judge(Steps(lines), config(), tmp_path)
    assert verdict.bottleneck == bottleneck, verdict.shares
    assert verdict.speed[0].startswith(f"{bottleneck.capitalize()} set the pace")
    if bottleneck == "training":
        assert max(line["buffer/look_ahead"] for line in lines) == 2, "as at the start"
    slept_s = 1e-6 * float(sleep_us) * sum(line["tokens/trained"] for line in lines)
    assert sum(line["perf/train_s"] for line in lines) >= slept_s


JUDGE = [
    "task={files: [a], reward: {judge: {base_url: 'http://x', model: m, prompt: '{completion}'}}}"
]
SERVED_JUDGE = [
    "task={files: [a], reward: {judge: {model: m, prompt: '{completion}'}}}"
]
REWARD_MODEL = ["task={files: [a], reward: {model: {path: a/b}}}"]
POSTED_LATER = [
    "task={python: 'a:B'}",
    "generator.python=a:b",
    "generator.outcomes=later",
]
TAUGHT = ["teacher.path=a/b", "algorithm.distill_weight=1"]
STRAGGLERS = "train_s=0.4 wait_generation_s=0.1 wait_stragglers_s=0.5"
MASKED = "train_s=0.95 tokens/trained=90 tokens/sampled=100 rollout/dropped=3"
BETWEEN = "train_s=0.3 wait_generation_s=0.1 request_s=0.4 journal_s=0.1"


@pytest.mark.parametrize(
    ("metrics", "settings", "bottleneck", "words"),
    [
        (
            "train_s=0.61 wait_generation_s=0.24",
            [],
            "training",
            "Training set the pace: 61% of the time over 20",
        ),
        (
            STRAGGLERS,
            [WAIT],
            "stragglers",
            "Set buffer.on_overdue=mask: it never waits",
        ),
        (
            BETWEEN,
            [],
            "other",
            "Work between steps set the pace: 60% of the time over 20 steps, the largest part",
        ),
        (BETWEEN, [], "other", "requests to the trainer (40%)."),
        (
            "train_s=0.29 wait_rewards_s=0.71",
            [],
            "rewards",
            "Rewards set the pace: 71% of the time over 20 steps.",
        ),
        (
            "train_s=0.29 wait_rewards_s=0.71",
            JUDGE,
            "rewards",
            "The judge set the pace: 71% of the time over 20 steps. Raise "
            "task.reward.judge.max_concurrent (now 16) if",
        ),
        (
            "wait_rewards_s=0.9 perf/scoring_s=9",
            REWARD_MODEL,
            "rewards",
            "The reward model set the pace: 90% of the time over 20 steps. Give it a "
            "faster device (placement.reward (now auto)), or",
        ),
        (
            "wait_rewards_s=0.9 perf/scoring_s=9",
            SERVED_JUDGE,
            "rewards",
            "The judge set the pace: 90% of the time over 20 steps. Raise "
            "task.reward.judge.max_concurrent (now 16), or give it a faster device "
            "(placement.judge (now auto)).",
        ),
        (
            "wait_teaching_s=0.9 wait_rewards_s=0.05 perf/scoring_s=9",
            [*JUDGE, *TAUGHT],
            "teaching",
            "Teaching set the pace: 90% of the time over 20 steps. Give it a faster "
            "device (placement.teacher (now auto)), or",
        ),
        (
            "wait_teaching_s=0.9",
            [*TAUGHT, "teacher.base_url=http://host:8000/v1"],
            "teaching",
            "Teaching set the pace: 90% of the time over 20 steps. Give the server at "
            "teacher.base_url more or faster devices.",
        ),
        (
            "wait_rewards_s=0.9",
            POSTED_LATER,
            "rewards",
            "Rewards that programs post set the pace: 90% of the time over 20 steps.",
        ),
        (
            "wait_rewards_s=0.9 judge/requests=30",
            [*JUDGE, "task.reward.judge.requests_per_minute=100"],
            "rewards",
            "Raise task.reward.judge.requests_per_minute (now 100) if",
        ),
        ("train_s=0.3", [], "other", "70% of the time over 20 steps."),
        ("train_s=0.55 wait_generation_s=0.45", [], "training", "Generation took 45%"),
        (
            MASKED,
            [],
            "training",
            "10.0% of the tokens, which were masked. Groups dropped as too old and",
        ),
        (
            "train_s=1 sample/staleness_mean=7.8",
            [],
            "training",
            "were 7.8 versions old on average, from which algorithm.loss=ppo_clip learns slowly: "
            "set algorithm.loss=age_clip, or lower buffer.look_ahead.",
        ),
        (
            "train_s=1 cores_fraction=0.87",
            [],
            "training",
            "The machine's cores were 87% busy: trainer, engines",
        ),
        (
            "train_s=1 engine/preempted=7",
            [],
            "training",
            "since the KV cache was full (rollout.slots=auto helps): 7.",
        ),
        (
            "train_s=1 rollout/given_up=5",
            [],
            "training",
            "controller.log names them): 5.",
        ),
    ],
)
def test_the_speed_names_shares_parts_and_losses(
    metrics: str, settings: list[str], bottleneck: str, words: str
) -> None:
    verdict = judge(Steps(steps(metrics)), config(*settings), RUN_DIR)
    assert verdict.bottleneck == bottleneck
    assert words in " ".join(verdict.speed)


AGENT = "generator.python=a:b generator.workers=2"
FULL = "engine/busy_slots=60 rollout/inflight=64"
IDLE = "engine/busy_slots=4 rollout/inflight=64"
CAUSES = {
    "slots": ("", FULL, "rollout.slots rollout.num_engines"),
    "slots that follow the engines": (
        "rollout.slots=auto",
        f"{FULL} rollout/slots=62",
        "rollout.num_engines",
    ),
    "an agent's slots": (AGENT, FULL, "rollout.slots rollout.num_engines"),
    "a slow tool": (AGENT, IDLE, "generator.concurrency"),
    "an agent that computes": (AGENT, f"{IDLE} harness/cpu_s=80", "generator.workers"),
    "few remote workers": ("generator.remote=true", f"{IDLE} harness/queued=30", ""),
    "reward workers": ("", f"{IDLE} perf/rewards_s=190", "task.reward_workers"),
    "reward processes": (
        "task.reward_pool=process",
        f"{IDLE} perf/rewards_s=190",
        "task.reward_workers",
    ),
    "an inline reward": (
        "task.reward_pool=inline",
        f"{FULL} perf/rewards_s=20",
        "task.reward_pool",
    ),
    "a slow async reward": (
        "",
        f"{IDLE} perf/rewards_s=20 sample/staleness_max=4",
        "buffer.max_staleness algorithm.loss",
    ),
    "a loss for old tokens": (
        "algorithm.loss=age_clip",
        f"{IDLE} sample/staleness_max=4",
        "buffer.max_staleness",
    ),
    "a look-ahead that equals the bound": (
        "buffer.look_ahead=4",
        f"{IDLE} sample/staleness_max=4",
        "buffer.max_staleness buffer.look_ahead algorithm.loss",
    ),
    "a small look-ahead": (
        "buffer.look_ahead=1",
        f"{IDLE} sample/staleness_max=1 buffer/look_ahead=1",
        "buffer.look_ahead",
    ),
    "a bound that was not reached": ("", f"{IDLE} sample/staleness_max=2", ""),
    "a look-ahead below the bound": (
        "",
        f"{IDLE} sample/staleness_max=4 buffer/look_ahead=2",
        "",
    ),
    "steps one by one": (
        "buffer.max_staleness=0",
        f"{IDLE} sample/staleness_max=0 buffer/look_ahead=0",
        "buffer.max_staleness",
    ),
    "colocated": (
        "buffer.max_staleness=0",
        f"{IDLE} sample/staleness_max=0 perf/handover_s=0.001",
        "",
    ),
}
"""Settings, metrics and true cures of a run of 50 s that waits for generation; its two
workers have 100 s.
"""
ALARMS = {
    "": "",
    "constant": "reward/mean=0.5 reward/std=0",
    "not finite": "trainer/skipped_steps=1",
    "cut": "sample/truncated_fraction=0.99",
    "failed": "",
}
SHARES = (
    "wait_generation_s",
    "train_s",
    "wait_rewards_s",
    "wait_teaching_s",
    "wait_stragglers_s",
    "wait_publishing_s",
    "handover_s",
    "request_s",
)
SETTING = r"\b([a-z]+\.[a-z_.]+)(?:=(\w+)| \(now ([^)]+)\))"
"""A setting with its new or its present value."""


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cure_is_true_and_new(cause: str) -> None:
    settings, metrics, cures = CAUSES[cause]
    run = config("task.reward_pool=auto", *settings.split())
    for share, (alarm, sick) in product(SHARES, ALARMS.items()):
        lines = steps(f"buffer/look_ahead=4 {metrics} {share}=0.7 {sick}", 50)
        speed = judge(Steps(lines), run, RUN_DIR, has_failed=alarm == "failed").speed
        texts = [text for text in speed if text.startswith(("Raise ", "Set "))]
        found = [match for text in texts for match in re.findall(SETTING, text)]
        case = (cause, share, alarm, speed)
        if alarm and (alarm != "cut" or not run.generator.is_harness):
            assert texts == [], case
        elif share == "wait_generation_s":
            assert {name for name, *_ in found} == set(cures.split()), case
        for name, new, now in found:
            present = str(attrgetter(name)(run)).lower()
            assert fields_named(name), case
            assert now == present or (new and new != present), case


def test_every_metric_behind_a_cure_is_declared() -> None:
    used = re.findall(
        r'f?"((?:buffer|engine|harness|perf|rollout|sample|tokens|trainer)/\w+)',
        Path(pace.__file__).read_text(),
    )
    assert len(used) > 15
    assert [name for name in used if name not in GAUGES] == []


def test_a_repeated_step_replaces_itself_and_later_steps() -> None:
    run = Steps([{"step": step, "reward/mean": step} for step in (0, 1, 2, 1)])
    assert (len(run), run.values("reward/mean"), run.last) == (
        2,
        [0.0, 1.0],
        {"step": 1, "reward/mean": 1},
    )


def test_slow_kernels_are_named() -> None:
    assert "uncompiled, at about half the speed" in " ".join(
        judged(trainer_compiled=0.0).speed
    )
    asked = judged(NUM, "trainer.compile=false", trainer_compiled=0.0)
    assert "uncompiled" not in " ".join(asked.speed)
    assert "install flash-attn-3" in " ".join(judged(trainer_flash_attention=2.0).speed)
    assert "flash" not in " ".join(judged(trainer_flash_attention=3.0).speed)
