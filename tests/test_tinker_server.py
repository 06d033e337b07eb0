"""A real Tinker server and the unmodified client: training, sampling, tenants, kills."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")

from safetensors.torch import load_file
from tinker_served import Served, free_port, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extras,
    pytest.mark.extension("tinker"),
    pytest.mark.timeout(600),
]
STORIES = Path(__file__).parent / "kit" / "tinker_stories.py"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("tinker") / "run") as one:
        yield one


def begin(name: str, url: str, *more: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(STORIES), name, url, *map(str, more)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def told(process: subprocess.Popen[str]) -> str:
    """Return what a client printed, once it has ended well."""
    out, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-6000:]
    return out


@pytest.mark.parametrize(
    "name",
    [
        "loss_falls_and_sampler_and_trainer_agree",
        "inflight_sampler_follows_the_weights",
        "prompt_numbers_agree_with_each_other",
        "stops",
        "equal_seeds_draw_equal_tokens",
        "repeated_and_reordered_requests_run_once",
        "fault_of_a_training_request_is_in_its_future",
        "failed_part_takes_the_step_with_it",
        "keys_reach_their_own_only",
        "state_goes_on_where_it_was_saved",
        "old_tokens_are_masked_and_told",
        "custom_loss_is_a_weighted_cross_entropy",
        "nonsense_gives_no_server_error",
        "refused_requests_get_a_sentence",
    ],
)
def test_clients_story(server: Served, name: str) -> None:
    told(begin(name, server.url))


def script(url: str, seed: int, owner: str, num_steps: int) -> subprocess.Popen[str]:
    return begin("script", url, seed, owner, num_steps)


def weights_at(run_dir: Path, path: str) -> dict[str, Any]:
    """Return the state that a checkpoint holds."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    folder = run_dir / kind / model_id.replace(":", "-")
    (file,) = folder.glob(f"{name}-*.safetensors")
    return {key: value.tolist() for key, value in load_file(file).items()}


def check_same(one: tuple[Path, str], other: tuple[Path, str]) -> None:
    """Check what two clients saw and saved. Each: run directory and output."""
    first, second = json.loads(one[1]), json.loads(other[1])
    paths = first.pop("path"), second.pop("path")
    assert first == second
    assert weights_at(one[0], paths[0]) == weights_at(other[0], paths[1])


def test_two_tenants_get_what_each_gets_alone(server: Served) -> None:
    given = [(0, "ann", 6), (1, "bob", 6)]
    alone = [told(script(server.url, *one)) for one in given]
    together = [script(server.url, *one) for one in given]
    for first, second in zip(alone, together, strict=True):
        check_same((server.run_dir, first), (server.run_dir, told(second)))


TENANTS = ((1, "ann", 20), (0, "bob", 13))
"""Their models have other ranks, and other versions at any time."""


@pytest.fixture(scope="module")
def expected(server: Served) -> list[str]:
    return [told(script(server.url, *one)) for one in TENANTS]


@pytest.mark.parametrize("victim", ["", "trainer_process", "asyncrl_servers.embedded"])
def test_kill_changes_nothing(
    server: Served, expected: list[str], tmp_path: Path, victim: str
) -> None:
    """kill -9 of the server, its trainer or its engine while two tenants train."""
    port = free_port()
    with served(tmp_path / "run", port=port) as first:
        clients = [script(first.url, *one) for one in TENANTS]
        with pytest.raises(subprocess.TimeoutExpired):
            clients[1].wait(random.Random(victim).uniform(5, 7))
        first.kill(victim)
        if victim:
            found = [told(client) for client in clients]
        else:
            with served(tmp_path / "run", port=port) as second:
                found = [told(client) for client in clients]
                assert second.process.poll() is None
    for one, other in zip(expected, found, strict=True):
        check_same((server.run_dir, one), (tmp_path / "run", other))
