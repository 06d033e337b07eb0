"""A run that needs more connections than this machine gives is refused before it starts, with the numbers and
what to write.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.placement import fit as connections
from asyncrl.placement.fit import refuse_too_many_connections, scarce_connections

CONFIGS = Path(__file__).parent.parent / "configs"
EVAL = "eval={task: {python: 'asyncrl.tasks.letters:Letters'}, slots: 10, num_prompts: 5}"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, int], None]:
    """Set the hard limit of descriptors and the number of ports."""

    def set_limits(descriptors: int, ports: int) -> None:
        (tmp_path / "range").write_text(f"1024\t{1023 + ports}\n")
        monkeypatch.setattr(connections, "PORT_RANGE", tmp_path / "range")
        monkeypatch.setattr(resource, "getrlimit", lambda _: (64, descriptors))

    return set_limits


def load(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def test_descriptors_are_counted_against_the_hard_limit(machine: Callable[[int, int], None]) -> None:
    config = load("quickstart", "rollout.slots=300", "rollout.num_engines=2")
    machine(856, 28232)
    refuse_too_many_connections(config)
    machine(855, 28232)
    with pytest.raises(ConfigError, match=r"needs 856 descriptors \(600 for rollouts") as caught:
        refuse_too_many_connections(config)
    assert "this process may have 855" in caught.value.what
    assert caught.value.way_out.endswith("or write rollout.slots=299.")
    refuse_too_many_connections(load("quickstart", "rollout.slots=299", "rollout.num_engines=2"))
    machine(100, 28232)
    with pytest.raises(ConfigError) as caught:
        refuse_too_many_connections(config)
    assert "or write" not in caught.value.way_out
    machine(4096, 28232)  # an agent's: the connections of the gateway are lowered before the rollouts
    with pytest.raises(ConfigError, match="8192 for the gateway") as caught:
        refuse_too_many_connections(load("agent"))
    written = caught.value.way_out.rpartition("write ")[2].rstrip(".")
    assert written.startswith("gateway.max_connections=")
    refuse_too_many_connections(load("agent", written))


def test_ports_are_counted_for_each_address(machine: Callable[[int, int], None]) -> None:
    machine(resource.RLIM_INFINITY, 28232)
    refuse_too_many_connections(load("quickstart", "rollout.slots=28232", "rollout.num_engines=2"))
    with pytest.raises(
        ConfigError, match="28500 connections to each engine, and this machine has 28232"
    ) as caught:
        refuse_too_many_connections(load("quickstart", "rollout.slots=28500", "rollout.num_engines=2"))
    assert caught.value.way_out.endswith("or write rollout.slots=28232.")
    with pytest.raises(ConfigError, match="28240 connections to the gateway") as caught:
        refuse_too_many_connections(load("agent", EVAL, "generator.concurrency=28230"))
    assert caught.value.way_out.endswith("or write generator.concurrency=28222.")
    refuse_too_many_connections(load("agent", EVAL, "generator.concurrency=28222"))


def test_calls_of_an_agent_at_once_may_need_more_and_that_is_told_and_not_refused(
    machine: Callable[[int, int], None],
) -> None:
    config = load("agent", EVAL)
    usual, worst = 64 + 10 + 8192 + 256, (64 + 10) * 16 + 8192 + 256
    machine(usual, 28232)
    refuse_too_many_connections(config)
    (note,) = scarce_connections(config)
    assert f"needs {worst} descriptors" in note
    assert f"this process may have {usual}" in note
    assert note.endswith("write gateway.max_concurrent_calls=1.")
    machine(worst - 1, 28232)
    (note,) = scarce_connections(config)
    assert note.endswith("write gateway.max_concurrent_calls=15.")
    assert scarce_connections(load("agent", EVAL, "gateway.max_concurrent_calls=15")) == []
    machine(worst, 28232)
    assert scarce_connections(config) == []
    machine(usual - 1, 28232)
    assert scarce_connections(config) == [], "it is refused"
    machine(usual, 28232)
    assert scarce_connections(load("quickstart")) == [], "a single completion is one request"
    machine(resource.RLIM_INFINITY, 1024)
    assert scarce_connections(load("agent", "gateway.max_connections=200")) == [], "64 rollouts of 16 calls"
    crowded = load("agent", EVAL, "gateway.max_connections=2000")
    (note,) = scarce_connections(crowded)
    assert "needs 1184 connections to the gateway" in note, "those of evaluations go there, too"
    assert note.endswith("write gateway.max_concurrent_calls=13.")


@pytest.mark.parametrize("name", ["agent", "quickstart", "smollm2"])
def test_the_shipped_configs_are_neither_refused_nor_noted_where_the_hard_limit_is_large(
    machine: Callable[[int, int], None], name: str
) -> None:
    machine(65536, 28232)
    refuse_too_many_connections(load(name))
    assert scarce_connections(load(name)) == []


def test_check_notes_what_may_not_suffice(machine: Callable[[int, int], None]) -> None:
    machine(9000, 28232)
    said = CliRunner().invoke(app, ["check", str(CONFIGS / "agent.yaml")]).stdout.splitlines()
    assert [line for line in said if line.startswith("note: the run needs 9472 descriptors")]


def test_check_says_so(machine: Callable[[int, int], None]) -> None:
    machine(300, 28232)
    result = CliRunner().invoke(app, ["check", str(CONFIGS / "quickstart.yaml")])
    assert isinstance(result.exception, ConfigError)
    assert "descriptors (" in result.exception.what
