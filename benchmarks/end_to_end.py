"""A whole run of asyncrl against TRL's GRPOTrainer and against a plain synchronous
loop.

    python benchmarks/end_to_end.py [--seeds 0 1 2] [--rates 1.5e-3 3e-3 6e-3]
    [--systems asyncrl trl ...] [--steps 400] [--skip-shape] [--work runs/end_to_end]
    [--plot] [--write]

The task is configs/quickstart.yaml (model, prompts, reward, batch, steps) for each
system:

    asyncrl     `asyncrl run`, as shipped (max_staleness 4)
    trl         GRPOTrainer, with the settings at the head of end_to_end_trl.py
    plain       sync_run.py: engine and trainer of asyncrl alternate in one process
    on-policy   `asyncrl run` at max_staleness 0, which must give the plain loop's numbers

Each run is a process, one at a time. First TRL and the plain loop choose their threads
(1 or 2; the plain loop 2 if that saves a tenth), and TRL its micro-batch and attention,
by the seconds of a few steps of the untrained model. Each system then runs its first
seed at every learning rate. The rate that reaches 0.8 first (or, without such a rate,
has the highest final reward) is used for the other seeds; `on-policy` uses the rate of
`plain`. A level is reached when the mean of the last 10 steps reaches it; a seed that
never does counts as infinite. Figures are medians over the seeds. Seconds are of the
loop, including the first generation; `started` adds the start-up of the process:
imports, model, engines.

SmolLM2-135M's shape (configs/smollm2.yaml, random weights, float32) is measured only in
seconds per step.

Results of finished runs are kept in --work and reused by the same command, so an
interrupted benchmark resumes. Remove that folder to measure again. Everything takes
about 30 minutes on 2 quiet cores. --plot draws reward against steps and seconds into
docs/results/end_to_end.png.

Last line: `ratio: X` = the smallest of TRL's over asyncrl's seconds to 0.7, to 0.8, and
asyncrl's over TRL's steps a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from common import ASYNCRL, CONFIGS, HERE, plain_options, reported
from end_to_end_runs import LEVELS, Curve, Measured, Work, best_rate, draw
from shape_task import make_shape

QUICKSTART, SMOLLM2 = CONFIGS / "quickstart.yaml", CONFIGS / "smollm2.yaml"
PROBE_STEPS, SHAPE_STEPS = 10, 3
WORTH = 0.9
SYSTEMS = {
    "asyncrl": "asyncrl, max_staleness 4",
    "trl": "TRL GRPOTrainer",
    "plain": "plain loop",
    "on-policy": "asyncrl, max_staleness 0",
}
TRL_SETTINGS = {
    "--threads": ("1", "2"),
    "--micro-batch": ("64", "16"),
    "--attention": ("sdpa", "eager"),
}
PLAIN = [sys.executable, str(HERE / "sync_run.py")]
TRL = [sys.executable, str(HERE / "end_to_end_trl.py")]


@dataclass(frozen=True)
class Chosen:
    trl: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


def command(system: str, overrides: list[str], chosen: Chosen) -> list[str]:
    """The quickstart under a system, but for --run-dir."""
    config = [str(QUICKSTART), *overrides]
    match system:
        case "asyncrl":
            return [*ASYNCRL, *config]
        case "on-policy":
            return [*ASYNCRL, *config, *chosen.plain, "buffer.max_staleness=0"]
        case "plain":
            return [*PLAIN, *config, *chosen.plain]
    return [*TRL, *config, *chosen.trl]


def choose(work: Work, systems: list[str]) -> Chosen:
    """Try a few steps that change nothing with each setting, one setting after the
    other.
    """
    still = [f"trainer.num_steps={PROBE_STEPS}", "trainer.learning_rate=1e-12"]

    def step_s(system: str, *settings: str) -> float:
        chosen = Chosen(trl=settings, plain=settings)
        return work.measure(
            f"probe-{system}-{'-'.join(settings)}", command(system, still, chosen)
        ).step_s

    trl, plain = list[str](), list[str]()
    if "trl" in systems:
        for option, values in TRL_SETTINGS.items():
            trl += min(
                ([option, value] for value in values),
                key=lambda pair: step_s("trl", *trl, *pair),
            )
    if "plain" in systems:
        one, two = (
            [f"rollout.threads={number}", f"trainer.threads={number}"]
            for number in (1, 2)
        )
        plain = two if step_s("plain", *two) < WORTH * step_s("plain", *one) else one
    return Chosen(tuple(trl), tuple(plain))


def measure_all(
    arguments: argparse.Namespace, work: Work, chosen: Chosen
) -> dict[str, Measured]:
    """Tune on the first seed, then the others at the best rate; the systems in turn."""
    first, *others = arguments.seeds

    def run(system: str, rate: str, seed: int) -> Curve:
        numbers = [
            f"seed={seed}",
            f"trainer.learning_rate={rate}",
            f"trainer.num_steps={arguments.steps}",
        ]
        return work.measure(
            f"{system}-rate{rate}-seed{seed}", command(system, numbers, chosen)
        )

    tuned: dict[str, dict[str, Curve]] = {
        name: {} for name in arguments.systems if name != "on-policy"
    }
    for rate in arguments.rates:
        for system, by_rate in tuned.items():
            by_rate[rate] = run(system, rate, first)
    found = {}
    for system, by_rate in tuned.items():
        rate = best_rate(by_rate)
        found[system] = Measured(rate, {first: by_rate[rate]})
    if "on-policy" in arguments.systems:
        found["on-policy"] = Measured(found["plain"].rate, {})
    for seed in (first, *others):
        for system, measured in found.items():
            if seed not in measured.curves:
                measured.curves[seed] = run(system, measured.rate, seed)
    print_tuning(tuned)
    return found


def print_tuning(tuned: dict[str, dict[str, Curve]]) -> None:
    print(
        f"\n{'first seed, at each learning rate':<36}{'to 0.8, s':>10}{'final reward':>14}"
    )
    for system, by_rate in tuned.items():
        for rate, curve in by_rate.items():
            reach_s = curve.reach_s(LEVELS[-1])
            print(
                f"{SYSTEMS[system] + ', ' + rate:<36}{seconds(reach_s):>10}{curve.final_reward:>14.3f}"
            )


def print_table(found: dict[str, Measured]) -> None:
    heads = "".join(f"{f'to {level}, s':>12}" for level in LEVELS)
    print(
        f"\n{'medians over seeds':<26}{'rate':>8}{'steps/min':>11}{heads}{'started, to 0.8':>17}"
        f"{'final reward (range)':>24}{'tokens':>8}"
    )
    for system, one in found.items():
        finals = [curve.final_reward for curve in one.curves.values()]
        final = f"{one.final_reward:.3f} ({min(finals):.3f} to {max(finals):.3f})"
        length = one.median(lambda curve: sum(curve.lengths) / len(curve.lengths))
        print(
            f"{SYSTEMS[system]:<26}{one.rate:>8}{one.median(lambda curve: curve.steps_per_min):>11.0f}"
            f"{''.join(f'{seconds(one.reach_s(level)):>12}' for level in LEVELS)}"
            f"{seconds(one.reach_s(LEVELS[-1], with_start=True)):>17}{final:>24}{length:>8.1f}"
        )
    print("tokens: mean length of a completion; steps with longer ones take longer")
    for system, one in found.items():
        for seed, curve in one.curves.items():
            reached = ", ".join(
                f"{level} after {seconds(curve.reach_s(level))} s" for level in LEVELS
            )
            print(
                f"{SYSTEMS[system]}, seed {seed}: {curve.steps_per_min:.0f} steps/min, {reached}"
            )


def seconds(value: float) -> str:
    return "-" if math.isinf(value) else f"{value:.1f}"


def over(slower_s: float, faster_s: float) -> float:
    """Ratio of seconds; 0 where ours never gets there."""
    return 0.0 if math.isinf(faster_s) else slower_s / faster_s


def print_goals(found: dict[str, Measured]) -> float:
    """Each goal with its figure; returns the last line's ratio, NaN without asyncrl or
    TRL.
    """
    ratio = math.nan
    asyncrl, trl, plain = (found.get(name) for name in ("asyncrl", "trl", "plain"))
    if asyncrl and trl:
        ratios = {
            "steps/min, times TRL": asyncrl.median(lambda curve: curve.steps_per_min)
            / trl.median(lambda curve: curve.steps_per_min)
        }
        for level in LEVELS[1:]:
            ratios[f"seconds to {level}, TRL over asyncrl"] = over(
                trl.reach_s(level), asyncrl.reach_s(level)
            )
        for name, value in ratios.items():
            goal(name, value, at_least=2.5)
        for level in LEVELS[1:]:
            both = [one.reach_s(level, with_start=True) for one in (trl, asyncrl)]
            print(f"{f'the same to {level}, start-up included':<52}{over(*both):>8.2f}")
        goal(
            "final reward, asyncrl less TRL",
            asyncrl.final_reward - trl.final_reward,
            at_least=0.0,
        )
        ratio = min(ratios.values())
    if asyncrl and plain:
        for level in LEVELS:
            value = over(plain.reach_s(level), asyncrl.reach_s(level))
            goal(f"seconds to {level}, plain loop over asyncrl", value, at_least=1.0)
    if plain and (on_policy := found.get("on-policy")):
        ours_s, plain_s = (
            one.median(lambda curve: curve.times_s[-1]) for one in (on_policy, plain)
        )
        goal(
            "seconds of all steps, plain loop over max_staleness 0",
            plain_s / ours_s,
            at_least=0.95,
        )
        same = all(
            on_policy.curves[seed].rewards == curve.rewards
            for seed, curve in plain.curves.items()
        )
        print(
            f"{'the same reward at every step of every seed':<52}{'yes' if same else 'no':>8}"
        )
    return ratio


def goal(name: str, value: float, *, at_least: float) -> None:
    print(
        f"{name:<52}{value:>8.2f}  goal {at_least:g}: {'met' if value >= at_least else 'missed'}"
    )


def measure_shape(work: Work) -> None:
    overrides = [
        f"model.path={make_shape(work.folder / 'smollm2-shape')}",
        "model.dtype=float32",
        "task={python: 'shape_task:ShapeTask', size: 1000, reward_pool: inline}",
        "eval=none",
        "rollout.max_tokens=32",
    ]
    ours = [*ASYNCRL, str(SMOLLM2), *overrides, f"trainer.num_steps={2 * SHAPE_STEPS}"]
    ours.append("checkpoint.every=none")
    theirs = [*TRL, str(SMOLLM2), *overrides, f"trainer.num_steps={SHAPE_STEPS}"]
    ours_s = work.measure("shape-asyncrl", ours).step_s
    trl_s = work.measure(
        "shape-trl", [*theirs, "--threads", "2", "--micro-batch", "8"]
    ).step_s
    print(
        "\nSmolLM2-135M's shape, random weights, float32: seconds a step, after the first"
    )
    print(
        f"{SYSTEMS['asyncrl']:<26}{ours_s:>8.1f}\n{SYSTEMS['trl'] + ', 2 threads':<26}{trl_s:>8.1f}"
    )
    goal("seconds a step, TRL over asyncrl", trl_s / ours_s, at_least=5.0)


def main() -> None:
    """Measure, print, draw."""
    parser = plain_options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--rates", nargs="+", default=["1.5e-3", "3e-3", "6e-3"], help="learning rates"
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument(
        "--steps", type=int, default=400, help="optimizer steps of a run"
    )
    parser.add_argument(
        "--skip-shape", action="store_true", help="leave SmolLM2-135M's shape out"
    )
    parser.add_argument(
        "--work", type=Path, default=HERE.parent / "runs" / "end_to_end"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="also keep the output in benchmarks/results/",
    )
    parser.add_argument(
        "--plot", action="store_true", help="write docs/results/end_to_end.png"
    )
    arguments = parser.parse_args()
    if "on-policy" in arguments.systems and "plain" not in arguments.systems:
        raise SystemExit(
            "on-policy takes the learning rate of plain.\n  Way out: add plain to --systems."
        )
    needs_trl = "trl" in arguments.systems or not arguments.skip_shape
    if needs_trl and importlib.util.find_spec("trl") is None:
        raise SystemExit("TRL is not installed.\n  Way out: pip install 'trl==1.16.0'")
    arguments.work.mkdir(parents=True, exist_ok=True)
    work = Work(arguments.work.resolve())
    with reported("end_to_end", is_kept=arguments.write):
        chosen = choose(work, arguments.systems)
        print(f"TRL: {' '.join(chosen.trl)}; plain loop: {' '.join(chosen.plain)}")
        found = measure_all(arguments, work, chosen)
        print_table(found)
        ratio = print_goals(found)
        if arguments.plot:
            labels = {
                name: f"{SYSTEMS[name]}, learning rate {one.rate}"
                for name, one in found.items()
            }
            runs = {name: [*one.curves.values()] for name, one in found.items()}
            draw(runs, labels, HERE.parent / "docs" / "results" / "end_to_end.png")
        if not arguments.skip_shape:
            measure_shape(work)
        print(f"ratio: {ratio:.2f}")


if __name__ == "__main__":
    main()
