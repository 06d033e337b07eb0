"""`asyncrl simulate`: the real buffer, producers and pool over the simulated engine, in virtual time, are the
truth that it has to tell: from the config alone, and from what such a run leaves in its directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pytest
from engine_replies import ask
from fakes import FakeEngine, FakeScorer
from rollout_cases import make_producers, single_turn
from typer.testing import CliRunner

from asyncrl.buffer.buffer import Buffer
from asyncrl.buffer.simulation import Simulation
from asyncrl.buffer.staleness import StalenessRule
from asyncrl.buffer.workload import RolloutPlan, SimulatedMachine, SimulationResult, TurnPlan
from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config, run_config_yaml
from asyncrl.engines.pool import EnginePool
from asyncrl.errors import ConfigError, RolloutFailure
from asyncrl.journal import schema
from asyncrl.messages.calls import CommitRequest, GenerateRequest, GenerateResponse, PrepareRequest
from asyncrl.messages.records import GroupId, Prompt
from asyncrl.observe.forecast.forecast import Forecast, ForecastSetting
from asyncrl.observe.forecast.forecast_case import Given, make_case
from asyncrl.observe.forecast.forecast_shown import render_forecast
from asyncrl.observe.forecast.run_timing import Integral, RecordedRollouts, Requests
from asyncrl.rollouts.rollout import RolloutAttempt
from asyncrl.rollouts.timed import RolloutTimes, Timed
from asyncrl.testing.virtual_time import run_virtual
from asyncrl_servers.simulated import SimulatedEngine, SimulatedSpec
from asyncrl_servers.weight_state import Staged

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
TRAIN_S, TOKEN_S, TOOL_S, TOOL_SIGMA = 0.2, 5e-4, 0.8, 0.7
NUM_BATCHES = 150
SETTINGS = [
    *("rollout.engine=simulated", "rollout.slots=24", "rollout.group_size=4", "trainer.num_groups=4"),
    *("rollout.simulated.decode_step_s=0.01", "rollout.simulated.per_row_s=0.002", "rollout.max_tokens=200"),
    *("rollout.simulated.mean_tokens=20", "rollout.simulated.sigma=0.7", "rollout.simulated.swap_s=0"),
    *("rollout.simulated.prefill_s_per_token=0", f"trainer.num_steps={NUM_BATCHES}"),
    *("weight_sync.interrupt=keep", "buffer.look_ahead=2"),
]


class Figures(NamedTuple):
    """Without the first fifth, and the last ones, beside which no group starts."""

    steps_per_s: float
    age_mean: float


class SimulatedClient:
    """In place of an EngineServer: the engine in this process."""

    name, num_commits, policy_version = "engine-0", 0, 0

    def __init__(self, config: RunConfig) -> None:
        values = config.rollout.simulated.model_dump()
        self.engine = SimulatedEngine(
            SimulatedSpec(
                name=self.name, slots=config.rollout.slots, max_length=300, vocab_size=200, **values
            )
        )

    async def generate_segment(self, request: GenerateRequest, **_: Any) -> GenerateResponse:
        (answer,) = ask(self.engine, [request])
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self.engine.abort([answer.run])
            raise

    async def commit(self, version: int) -> None:
        request = PrepareRequest(version=version, path="", digest="digest", num_tensors=0, num_bytes=0)
        self.engine.weights.staged = Staged(request)
        await self.engine.commit(CommitRequest(version=version, digest="digest", interrupt="keep"))
        self.policy_version = version


class Tools(FakeScorer):
    """Score after a wait of a long tail."""

    async def score(self, prompt: Prompt, completion: str) -> float:
        draw = random.Random(f"{prompt.prompt_id} {prompt.num_handed_back} {completion}")
        await asyncio.sleep(draw.lognormvariate(-(TOOL_SIGMA**2) / 2, TOOL_SIGMA) * TOOL_S)
        return 0.0


def play_product(config: RunConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Figures:
    """A run without processes, which leaves what a forecast reads."""
    steps, taken, served = list[dict[str, float]](), list[float](), list[float]()
    run_dir.mkdir()

    async def story() -> None:
        clock = asyncio.get_running_loop().time
        monkeypatch.setattr(time, "time", clock)
        client = SimulatedClient(config)
        pool = EnginePool([client], slots=config.rollout.slots)  # type: ignore[list-item]
        buffer = Buffer(
            config.buffer,
            num_groups=config.trainer.num_groups,
            num_batches=NUM_BATCHES,
            on_handed_back=lambda *handed_back: producers.handed_back(*handed_back),
        )
        async with asyncio.TaskGroup() as tasks:
            producers = make_producers(
                buffer,
                tasks.create_task,
                Timed(single_turn(pool, Tools(), max_tokens=200), pool, run_dir),
                group_size=config.rollout.group_size,
                capacity=config.rollout.slots,
            )
            running = tasks.create_task(producers.run())
            for version in range(NUM_BATCHES):
                batch = await buffer.wait_batch()
                taken.append(clock())
                trajectories = [one for group in batch.groups for one in group.trajectories]
                tokens = sum(one.num_sampled for one in trajectories)
                train_s = TRAIN_S + TOKEN_S * tokens
                await asyncio.sleep(train_s)
                await client.commit(version + 1)
                buffer.set_served_nowait(version + 1)
                served.append(clock())
                oldest = [max(one.oldest_version, batch.min_version) for one in trajectories]
                step = {
                    "step": version + 1,
                    "time_s": clock(),
                    "perf/train_s": train_s,
                    "tokens/sampled": tokens,
                }
                step |= {"perf/packed_tokens": tokens}
                step |= {"perf/wait_s": buffer.last_wait.total_s}
                steps.append(step | {"sample/staleness_mean": fmean(version - one for one in oldest)})
            running.cancel()
            await producers.aclose()

    run_virtual(story())
    (run_dir / "config.yaml").write_text(run_config_yaml(config))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    schema.create(run_dir / "journal.sqlite", "run")
    with closing(schema.connect(run_dir / "journal.sqlite", is_read_only=False)) as journal:
        rows = [(version, 0, 0, 4, taken_s) for version, taken_s in enumerate(taken)]
        names = "version, min_version, mask_older, num_groups, taken_s"
        journal.executemany(f"INSERT INTO batches ({names}) VALUES (?, ?, ?, ?, ?)", rows)
        pushes = [(version, "", served_s) for version, served_s in enumerate(served, 1)]
        journal.executemany("INSERT INTO publishes VALUES (?, ?, ?)", pushes)
    first = NUM_BATCHES // 5
    counted = steps[first : NUM_BATCHES - 1 - config.buffer.max_staleness]
    wall_s = counted[-1]["time_s"] - steps[first - 1]["time_s"]
    return Figures(len(counted) / wall_s, fmean(step["sample/staleness_mean"] for step in counted))


def case_config(max_staleness: int, on_overdue: str) -> RunConfig:
    ahead = min(2, max_staleness)
    values = {"max_staleness": max_staleness, "on_overdue": on_overdue, "look_ahead": ahead}
    return load_config(QUICKSTART, [*SETTINGS, *(f"buffer.{name}={value}" for name, value in values.items())])


def told(case: Any) -> Figures:
    """Of the present setting."""
    played: list[SimulationResult] = [case.play(case.present, seed=seed) for seed in range(3)]
    return Figures(fmean(one.batches_per_s for one in played), fmean(one.age_mean for one in played))


def test_each_attempt_leaves_a_line_and_a_full_file_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.rollouts.timed.MAX_BYTES", 150)  # two lines
    monkeypatch.setattr("asyncrl.rollouts.timed.GATHER_S", 0.0)

    async def story() -> None:
        engine = FakeEngine(latency_s=lambda request: 2.0)
        timed = Timed(single_turn(engine, Failing()), engine, tmp_path)  # type: ignore[arg-type]
        for index, name in enumerate(("good", "fails", "slow", "good", "fails")):
            prompt = Prompt(name, ({"role": "user", "content": "q"},))
            attempt = RolloutAttempt(f"g7/r{index}", GroupId(7), prompt, index, 0, lambda: None)
            with contextlib.suppress(RolloutFailure, TimeoutError):
                await asyncio.wait_for(timed.run_attempt(attempt), 10.0)

    run_virtual(story())
    text = "".join((tmp_path / name).read_text() for name in ("rollouts.old.jsonl", "rollouts.jsonl"))
    lines = [json.loads(line) for line in text.splitlines()]
    found = [(line["sample"], line["how"]) for line in lines]
    assert found == [(2, "cut"), (3, "done"), (4, "failed")], "the oldest two are gone"


def test_the_last_lines_of_a_run_are_written_however_soon_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.rollouts.timed.GATHER_S", 3600.0)

    async def story() -> None:
        engine = FakeEngine(latency_s=lambda request: 2.0)
        timed = Timed(single_turn(engine, Failing()), engine, tmp_path)  # type: ignore[arg-type]
        prompt = Prompt("slow", ({"role": "user", "content": "q"},))
        attempts = [RolloutAttempt(f"g7/r{at}", GroupId(7), prompt, at, 0, lambda: None) for at in range(3)]
        running = [asyncio.ensure_future(timed.run_attempt(attempt)) for attempt in attempts]
        await asyncio.sleep(10.0)
        for task in running:
            task.cancel()
        await asyncio.wait(running)

    run_virtual(story())
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["sample"], line["how"]) for line in lines] == [(at, "cut") for at in range(3)]


class Failing(FakeScorer):
    """Scores by the name of the prompt."""

    async def score(self, prompt: Prompt, completion: str) -> float:
        if prompt.prompt_id == "fails":
            raise RolloutFailure("no score")
        await asyncio.sleep(60.0 if prompt.prompt_id == "slow" else 1.0)
        return 1.0


OTHERS = [(0, "mask"), (1, "mask"), (2, "wait"), (4, "drop")]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[int, str], Figures]]:
    """The directory of one run, and the figures of it and of runs with other settings."""
    folder, found = tmp_path_factory.mktemp("runs"), dict[tuple[int, str], Figures]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        for setting in [(4, "mask"), *OTHERS]:
            name = folder / f"{setting[0]}-{setting[1]}"
            found[setting] = play_product(case_config(*setting), name, monkeypatch)
    return folder / "4-mask", found


@pytest.mark.parametrize(("max_staleness", "on_overdue"), [(4, "mask"), *OTHERS])
def test_a_run_tells_of_itself_and_of_other_settings_within_ten_percent(
    truth: tuple[Path, dict[tuple[int, str], Figures]], max_staleness: int, on_overdue: str
) -> None:
    run_dir, figures = truth
    values = [f"buffer.max_staleness={max_staleness}", f"buffer.on_overdue={on_overdue}"]
    case = make_case(run_dir, [*values, f"buffer.look_ahead={min(2, max_staleness)}"], Given())
    assert told(case) == pytest.approx(figures[max_staleness, on_overdue], rel=0.1)


@pytest.mark.parametrize(("max_staleness", "on_overdue"), [(4, "mask"), (0, "mask"), (2, "wait")])
def test_so_does_the_config_with_what_is_known_of_it(
    truth: tuple[Path, dict[tuple[int, str], Figures]], max_staleness: int, on_overdue: str
) -> None:
    given = Given(tool_s=f"{TOOL_S},{TOOL_SIGMA}", train_s=TRAIN_S + 16 * 20 * TOKEN_S, push_s=0.0)
    path = truth[0].parent / f"{max_staleness}-{on_overdue}" / "config.yaml"
    assert told(make_case(path, [], given)) == pytest.approx(truth[1][max_staleness, on_overdue], rel=0.1)


def test_the_speeds_of_engine_and_trainer_are_found(truth: tuple[Path, Any]) -> None:
    machine = make_case(truth[0], [], Given()).machine
    assert machine.step_s + 12 * machine.row_s == pytest.approx(0.01 + 12 * 0.002, rel=0.05)
    assert (machine.train_s, machine.train_token_s) == pytest.approx((TRAIN_S, TOKEN_S), rel=0.02)
    found = machine.train_drag, machine.decode_drag, machine.request_s, machine.admit_s
    assert found == pytest.approx((0, 0, 0, 0), abs=0.02)


class Recorded(Simulation):
    """Leaves the lines that a run would."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.lines: dict[int, RolloutTimes] = {}
        self.served_s: list[float] = []

    def _decode(self, rollout: Any) -> None:
        line = self.lines.setdefault(
            id(rollout),
            RolloutTimes(
                group=rollout.group_id, sample=0, start_s=0.0, turns=[], held_s=0, end_s=0, how="done"
            ),
        )
        super()._decode(rollout)
        *_, (_, _, tokens) = rollout.sampled
        line["turns"].append((self.now_s, 0.0, int(rollout.num_tokens - tokens), int(tokens)))
        self.kept = [*getattr(self, "kept", []), rollout]  # or another one would get its id

    def _leave(self, rollout: Any, engine: Any) -> None:
        super()._leave(rollout, engine)
        turns = self.lines[id(rollout)]["turns"]
        turns[-1] = (turns[-1][0], self.now_s, *turns[-1][2:])

    def _published(self, version: int) -> None:
        super()._published(version)
        self.served_s.append(self.now_s)


def test_what_an_engine_reads_again_after_a_swap_is_found() -> None:
    """Rollouts of two turns with a tool between them, on a machine that is known."""
    draw = random.Random(0)
    plans = [
        RolloutPlan(
            tuple(TurnPlan(wait_s, 20.0, float(draw.randint(5, 60))) for wait_s in (0.0, draw.random()))
        )
        for _ in range(400)
    ]
    rule = StalenessRule(num_groups=4, num_batches=60, max_staleness=3, on_overdue="mask", look_ahead=3)
    machine = SimulatedMachine(
        16, step_s=0.01, row_s=0.002, admit_s=0.02, read_s=5e-4, train_s=0.8, pause_s=0.05
    )
    recorded = Recorded(rule, RecordedRollouts([[plan] for plan in plans], 1), machine)
    recorded.run()
    lines = list(recorded.lines.values())
    requests = Requests(lines, dict.fromkeys(range(rule.num_issued), 1), recorded.served_s, 1, "abort")
    never = Integral(np.array([0.0, 1.0]), np.zeros(2))
    found, drag = requests.fit(never, machine.pause_s)
    assert found[0] + 8 * found[1] == pytest.approx(0.01 + 8 * 0.002, rel=0.05)
    assert found[4] == pytest.approx(5e-4, rel=0.1)
    assert drag == 0


def test_a_token_takes_time_though_the_fit_finds_that_the_requests_alone_do() -> None:
    """Longer requests that were answered sooner, by chance: a run of an agent with few steps had them."""
    lines = [
        RolloutTimes(
            group=index,
            sample=0,
            start_s=10.0 * index,
            turns=[(0.0, 2.0 - index / 10, 0, 1 + index)],
            held_s=2.0,
            end_s=2.0,
            how="done",
        )
        for index in range(8)
    ]
    requests = Requests(lines, dict.fromkeys(range(8), 1), [], 1, "abort")
    never = Integral(np.array([0.0, 1.0]), np.zeros(2))
    (step_s, *others), drag = requests.fit(never, 0.0)
    assert step_s == pytest.approx(sum(2.0 - index / 10 for index in range(8)) / sum(range(1, 9)))
    assert ([*others], drag) == ([0.0] * 4, 0.0)
    rule = StalenessRule(num_groups=1, num_batches=6, max_staleness=1, on_overdue="wait", look_ahead=1)
    plans = [[RolloutPlan((TurnPlan(0.0, 0.0, 1.0 + index),))] for index in range(8)]
    result = Simulation(rule, RecordedRollouts(plans, 1), SimulatedMachine(2, step_s=step_s)).run()
    assert 0 < result.batches_per_s < 1 / step_s


def test_what_was_cut_short_counts_as_long_as_what_took_longer(truth: tuple[Path, Any]) -> None:
    """At max_staleness 1 groups that wait for long are dropped: to leave them out would make tools fast."""
    short = make_case(truth[0].parent / "1-mask", [], Given()).workload
    assert isinstance(short, RecordedRollouts)
    waits = [plan.reward_s for group in short.groups for plan in group]
    lines = (truth[0].parent / "1-mask" / "rollouts.jsonl").read_text().splitlines()
    done = [line for line in map(json.loads, lines) if line["how"] == "done"]
    assert fmean(line["end_s"] - line["held_s"] for line in done) < 0.97 * TOOL_S, "they are missing there"
    assert fmean(waits) == pytest.approx(TOOL_S, rel=0.06)


def rows_of(*outcomes: tuple[int, float, float, float]) -> Forecast:
    """(max_staleness, steps a second, mean age, masked) of the present setting and others."""
    zeros = {field.name: 0 for field in fields(SimulationResult)}
    rows = []
    for bound, steps_per_s, age, masked in outcomes:
        values = {"batches_per_s": steps_per_s, "age_mean": age, "masked_fraction": masked}
        rows.append((ForecastSetting(bound, "mask", "auto", 1, 1), SimulationResult(**zeros | values)))
    return Forecast(make_case(QUICKSTART, [], Given()), tuple(rows))


@pytest.mark.parametrize(
    ("outcomes", "chosen", "reason"),
    [
        (
            [(8, 1.0, 4.0, 0.0), (4, 0.98, 2.0, 0.0), (2, 0.9, 1.0, 0.0)],
            4,
            "its data is 2.00 versions old on average, not 4.00; it is as fast (within 3%)",
        ),
        ([(8, 1.0, 2.05, 0.0), (4, 0.98, 2.0, 0.0)], 8, ""),
        (
            [(4, 1.0, 2.0, 0.2), (8, 0.9, 3.0, 0.0)],
            8,
            "20.0% of the present run's tokens are masked, none would be; it is 10.0% slower",
        ),
        (
            [(4, 2.81, 2.0, 0.063), (8, 2.81, 3.0, 0.0)],
            8,
            "6.3% of the present run's tokens are masked, none would be; it is as fast (within 3%)",
        ),
        ([(1, 1.0, 1.0, 0.0), (4, 1.5, 2.0, 0.0004)], 4, "it is 50.0% faster"),
        (
            [(1, 1.0, 1.0, 0.01), (4, 1.5, 2.0, 0.02)],
            4,
            "it is 50.0% faster; 1.0% of the present run's tokens are masked, 2.0% would be",
        ),
        (
            [(1, 0.965, 1.0, 0.0), (4, 0.975, 2.0, 0.0), (8, 1.0, 3.0, 0.0)],
            4,
            "the present one is 3.5% slower than the fastest",
        ),
    ],
    ids=[
        "younger data at the speed of the best",
        "as old: keep what is there",
        "masked tokens teach nothing",
        "masked tokens alone",
        "faster",
        "faster and more masked",
        "a little too slow",
    ],
)
def test_the_choice_is_the_youngest_data_near_the_best_speed(
    outcomes: list[tuple[int, float, float, float]], chosen: int, reason: str
) -> None:
    forecast = rows_of(*outcomes)
    assert forecast.choice[0].max_staleness == chosen
    first, second, *_ = forecast.why()
    keeps = chosen == outcomes[0][0]
    assert first.startswith("Keep" if keeps else f"Set buffer.max_staleness={chosen}: ")
    assert second.startswith("Reason: ") != keeps
    assert keeps or second == f"Reason: {reason}."


def test_turns_and_splits_of_the_devices_are_played_where_there_are_devices() -> None:
    case = make_case(QUICKSTART, ["placement.trainer=auto", "placement.rollout=auto"], Given(devices=4))
    parts = {setting.parts for setting in case.settings()}
    assert parts == {"1+1", "1+2", "1+3", "2+2", "3+1", "turns 4"}
    alone, turns = (case.machine_of(ForecastSetting(0, "mask", "auto", 4, ranks)) for ranks in (1, None))
    assert (turns.train_s, turns.publish_s) == (alone.train_s / 4, case.handover_s)
    assert {setting.parts for setting in make_case(QUICKSTART, [], Given()).settings()} == {
        "1+1",
        "1+2",
        "turns 1",
    }, "sides that share cores: none can change sides"


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["buffer.max_staleness=0"], "1+1"),
        (["buffer.max_staleness=0", "placement.rollout=trainer"], "turns 1"),
        (["buffer.max_staleness=3", "buffer.look_ahead=1", "rollout.num_engines=2"], "1+2"),
    ],
    ids=["in step", "in turns", "two engines and a fixed look-ahead"],
)
def test_every_setting_around_any_present_one_can_be_played(settings: list[str], parts: str) -> None:
    small = ["trainer.num_groups=2", "rollout.group_size=2", "rollout.slots=8"]
    forecast = Forecast.of(make_case(QUICKSTART, [*small, *settings], Given(devices=4)))
    assert forecast.present[0].parts == parts
    assert min(result.batches_per_s for _, result in forecast.rows) > 0
    assert all(result.age_max <= setting.max_staleness for setting, result in forecast.rows)


def test_the_page_shows_what_the_command_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (QUICKSTART.parent.parent / "docs" / "simulate.md").read_text(encoding="utf-8")
    command, shown = re.search(r"```text\n\$ asyncrl (simulate .*)\n([^`]*)```", page).groups()  # type: ignore[union-attr]
    monkeypatch.chdir(QUICKSTART.parent.parent)
    monkeypatch.setenv("COLUMNS", "90")
    plot = tmp_path / "p.png"
    printed = CliRunner().invoke(app, [*command.split(), "--plot", str(plot)]).output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [line.rstrip() for line in printed.splitlines()][:-1] == shown.splitlines()


def test_for_machines_it_is_json_with_every_setting() -> None:
    settings = ["trainer.num_groups=2", "rollout.slots=8", "rollout.group_size=2"]
    plain = json.loads(render_forecast(QUICKSTART, settings, Given(), as_json=True))
    assert plain["present"] in plain["settings"]
    assert plain["choice"] in plain["settings"]
    assert "2,000 tokens/s of an engine with all slots busy (--tokens-per-s)" in plain["sources"][0]
    assert {(row["max_staleness"], row["on_overdue"]) for row in plain["settings"]} >= {
        *((bound, "mask") for bound in (0, 1, 2, 4, 8)),
        *((bound, overdue) for bound in (1, 2, 4, 8) for overdue in ("wait", "drop")),
    }


def test_what_cannot_be_forecast_is_refused(truth: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--train-s is given for the run"):
        make_case(truth[0], [], Given(train_s=1.0))
    with pytest.raises(ConfigError, match="--lengths=long"):
        make_case(QUICKSTART, [], Given(lengths="long"))
    (tmp_path / "config.yaml").write_text((truth[0] / "config.yaml").read_text())
    with pytest.raises(ConfigError, match="0 rollouts in rollouts.jsonl.* takes 5 steps"):
        make_case(tmp_path, [], Given())
