from __future__ import annotations

import pytest
from placement_cases import load

from asyncrl.config import RunConfig
from asyncrl.observe.run_numbers import Steps, TimeShares, TrainerNumbers
from asyncrl.observe.verdict import judge

ZERO, TWO = "buffer.max_staleness=0", "buffer.max_staleness=2"
WAIT = "buffer.on_overdue=wait"
FILTER = "buffer.filter=equal_rewards"


def config(*overrides: str) -> RunConfig:
    return load("trainer.num_groups=4", "buffer.max_staleness=4", *overrides)


def steps(text: str, num: int = 20) -> list[dict[str, float]]:
    """Steps of 1 s each, with metrics like `train_s=0.4 rollout/inflight=64`; perf/ is left out."""
    parts = dict(part.split("=") for part in f"step_s=1 {text}".split())
    metrics = {name if "/" in name else f"perf/{name}": float(value) for name, value in parts.items()}
    return [{"step": n, "time_s": 10.0 + n, "reward/mean": n / num, **metrics} for n in range(1, num + 1)]


GENERATION, PUBLISHING = "train_s=0.3 wait_generation_s=0.65", "train_s=0.4 wait_publishing_s=0.6"
STRAGGLERS = "train_s=0.4 wait_generation_s=0.1 wait_stragglers_s=0.5"
MASKED = "train_s=0.95 tokens/trained=90 tokens/sampled=100 rollout/dropped=3"


@pytest.mark.parametrize(
    ("metrics", "settings", "bottleneck", "words"),
    [
        ("train_s=0.9 wait_generation_s=0.04", [], "training", "waited 4% of the time (training 90%"),
        ("train_s=0.9 sample/staleness_mean=1.5", [], "training", "data of 1.5 versions"),
        (GENERATION, [], "generation", "Generation held the run back: the trainer waited 65%"),
        (f"{GENERATION} rollout/inflight=64", [], "generation", "raise rollout.slots (now 64) or"),
        (f"{GENERATION} rollout/inflight=20", [], "generation", "only 20 of 64 slots were used"),
        (
            f"{GENERATION} rollout/inflight=20 engine/up=1.5",
            ["rollout.num_engines={max: 4}"],
            "generation",
            "raise engines=N of `asyncrl scale` (1.5 of at most 4 on average): only 20 of 96 slots were used",
        ),
        (GENERATION, [ZERO], "generation", "Knob: buffer.max_staleness=0"),
        (GENERATION, ["buffer.look_ahead=1"], "generation", "buffer.look_ahead=1"),
        (f"{PUBLISHING} weight_sync_s=2.5", [], "publishing", "a push takes 2.5 s"),
        (PUBLISHING, ["weight_sync.interrupt=wait"], "publishing", "weight_sync.interrupt=wait drains"),
        (STRAGGLERS, [TWO, WAIT], "stragglers", "or raise buffer.max_staleness (now 2) to 4"),
        (STRAGGLERS, [TWO, WAIT], "stragglers", "on_overdue=wait cost 10.0 s (50.0%)"),
        ("train_s=0.4 handover_s=0.5", [ZERO], "turns", "50% of the time went into handovers"),
        ("train_s=0.82 wait_generation_s=0.18", [], "balanced", "none stands out"),
        ("train_s=0.3 wait_generation_s=0.1", [], "other", "60% of the time went into neither"),
        (MASKED, [], "training", "10.0% of the tokens were masked, 3 groups generated again. A larger"),
        (MASKED, ["buffer.on_overdue=drop"], "training", "on_overdue=drop: 3 groups generated again."),
        ("train_s=1 rollout/given_up=5", [], "training", "5 prompts given up (rollout.max_hand_backs=3)"),
        ("train_s=1 rollout/filtered=20", [FILTER], "training", "replaced 20 groups (20.0% of those that"),
        ("train_s=1 rollout/filtered=100", [FILTER], "training", "Prompts of another difficulty"),
        ("train_s=1 trainer/skipped_steps=1", [], "training", "20 optimizer steps (batches 1, 2, 3, 4, 5"),
    ],
)
def test_a_verdict_names_what_held_the_run_back_its_knob_and_what_was_lost(
    metrics: str, settings: list[str], bottleneck: str, words: str
) -> None:
    verdict = judge(Steps(steps(metrics)), config(*settings))
    assert verdict.bottleneck == bottleneck
    assert words in " ".join(verdict.sentences)


def test_the_reward_is_that_of_the_first_five_steps_and_of_the_last_tenth() -> None:
    verdict = judge(Steps(steps("train_s=1", num=50)), config())
    assert (verdict.reward_first, verdict.reward_last) == (pytest.approx(3 / 50), pytest.approx(48 / 50))
    assert (verdict.num_steps, verdict.wall_s) == (50, 60.0)
    one = judge(Steps(steps("train_s=1", num=1)), config())
    assert one.reward_first == one.reward_last == 1.0


def test_shares_add_up_to_one_even_where_parts_exceed_the_whole() -> None:
    shares = TimeShares.of(Steps(steps("train_s=0.9 wait_generation_s=0.3")).total)
    assert (shares.training, shares.waiting + shares.other) == pytest.approx((0.75, 0.25))
    assert TimeShares.of(Steps([{"step": 1}]).total).other == 1.0


def test_a_step_that_was_taken_again_takes_the_place_of_all_from_there_on() -> None:
    run = Steps([{"step": step, "reward/mean": step} for step in (0, 1, 2, 1)])
    assert (len(run), run.values("reward/mean"), run.last) == (2, [0.0, 1.0], {"step": 1, "reward/mean": 1})


TRAINED = "train_s=0.5 forward_s=0.1 backward_s=0.25 optimizer_s=0.05 pack_s=0.001 device_tokens_per_s=12000"


@pytest.mark.parametrize(
    ("metrics", "rows"),
    [
        ("train_s=0.5", {}),
        (
            f"{TRAINED} host_memory_bytes=3221225472",
            {
                "training": "forward 20%, backward 50%, optimizer 10%, the rest 20%",
                "trainer": "12,000 packed tokens/s a device, 3.0 GiB of the host",
            },
        ),
        (
            f"{TRAINED} mfu=0.314 device_memory_bytes=107374182400",
            {"trainer": "12,000 packed tokens/s a device, MFU 31.4%, 100.0 GiB of the device"},
        ),
    ],
)
def test_a_verdict_tells_how_the_trainer_used_its_time_and_its_device(
    metrics: str, rows: dict[str, str]
) -> None:
    trainer = judge(Steps(steps(metrics)), config()).trainer
    assert trainer is not None
    found = dict(trainer.rows())
    assert {name: found.get(name) for name in rows} == rows
    assert rows or not found


def test_rates_are_means_over_time_and_memory_is_the_most_of_all_steps() -> None:
    short = {"step": 0, "perf/train_s": 1.0, "perf/mfu": 0.4, "perf/host_memory_bytes": 7.0}
    long = {"step": 1, "perf/train_s": 3.0, "perf/mfu": 0.2, "perf/host_memory_bytes": 5.0}
    trainer = TrainerNumbers.of(Steps([short, long, {"step": 2, "perf/train_s": 9.0}]))
    assert (trainer.mfu, trainer.host_memory_bytes) == (pytest.approx(0.25), 7.0)
    assert trainer.tokens_per_device_s is None
