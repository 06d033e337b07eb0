"""Fixtures that several parts share."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import typer.main
from hypothesis import settings
from needed_extensions import missing_of
from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    from trainer_cases import MakeStep
    from vllm_house import World

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What benchmarks, Ray and MLflow set when imported, and no fork can have by itself:
# forked_processes.py.
os.environ |= {
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_CLIENT_MODE": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# scikit-learn
os.environ |= {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}

# A job in the background of a script has SIGINT and SIGQUIT ignored, and all its children
# inherit that: tests of signals would wait for their limits.
for ignored in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)

# The commands are built once, not for each command line of a test: 50 ms.
typer.main.get_command = functools.cache(typer.main.get_command)

settings.register_profile("on a machine of any speed", deadline=None)
# In CI the same examples each time, so a failure comes from the change, not from
# chance.
settings.load_profile("ci" if os.environ.get("CI") else "on a machine of any speed")

IMPORTED = {
    "ray": ["test_several_hosts.py"],
    "selenium": ["test_page_in_browser.py"],
}
"""Files that import a package of the extra dev. Their tests are marked slow or extras.
"""
collect_ignore = [
    file
    for package, files in IMPORTED.items()
    if find_spec(package) is None
    for file in files
]


PART, _, NUM_PARTS = os.environ.get("ASYNCRL_PART", "0").partition("/")
"""3/8 runs the third of eight parts of the slow tests; 0 runs all. CI chooses the part by
the commit (.ci/run).
"""
IN_EACH_PART = ["test_job_resume.py", "test_pairs.py"]
"""Files of the promises of a run that is killed and resumed, and of runs that the commit
draws.
"""
SECONDS = {
    "test_gpu_acceptance.py": 340,
    "test_job_resume.py": 300,
    "test_several_hosts.py": 210,
    "test_extensions.py": 200,
    "test_skills.py": 190,
    "test_tutorial.py": 190,
    "test_job_vllm.py": 150,
    "test_packaging.py": 150,
    "test_pairs.py": 150,
    "test_tinker_cookbook.py": 150,
    "test_job_faults.py": 140,
    "test_engines_vllm_lora.py": 110,
    "test_servers_asleep.py": 100,
    "test_trainer_compiled.py": 100,
    "test_vllm_supports.py": 100,
    "test_evaluate.py": 90,
    "test_python_api.py": 90,
    "test_frameworks.py": 80,
    "test_reward_model.py": 80,
    "test_sft_then_rl.py": 80,
    "test_distillation.py": 60,
    "test_environments.py": 60,
    "test_experts.py": 60,
    "test_gateway_compared.py": 60,
    "test_job_mix.py": 60,
    "test_openenv.py": 60,
    "test_policy_teacher.py": 60,
    "test_served_teacher.py": 60,
    "test_sweep.py": 60,
    "test_vllm_server.py": 60,
}
"""Time of the slow tests of a file on two cores; of other files 20 s are assumed."""
QUICKSTARTS = {2: 200, 3: 200}
"""Time of the tests that a quickstart of .ci/run replaces, by part."""
SLOW = ("slow", "vllm", "gpu", "extras", "long")


def is_marked(item: pytest.Item, *names: str) -> bool:
    return any(item.get_closest_marker(name) is not None for name in names)


def of_other_parts(
    items: list[pytest.Item], part: int, num_parts: int
) -> set[pytest.Item]:
    """Return the slow tests that a part leaves out.

    Tests of a file share runs and servers, so whole files rotate. Tests marked rotated
    share nothing and rotate one by one.
    """
    alone = [item for item in items if is_marked(item, "rotated")]
    alone.sort(key=lambda item: item.nodeid)
    others = {*alone} - {*alone[part - 1 :: num_parts]}
    slow = [
        item
        for item in items
        if is_marked(item, *SLOW)
        and not is_marked(item, "rotated")
        and item.path.name not in IN_EACH_PART
    ]
    # The longest file first, each to the part with the least time.
    times = {item.path.name: SECONDS.get(item.path.name, 20) for item in slow}
    filled = {number: QUICKSTARTS.get(number, 0) for number in range(1, num_parts + 1)}
    part_of = dict[str, int]()
    for name in sorted(times, key=lambda name: (-times[name], name)):
        part_of[name] = min(filled, key=lambda number: filled[number])
        filled[part_of[name]] += times[name]
    return others | {item for item in slow if part_of[item.path.name] != part}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting imports a million objects, none of them garbage. The collector of
    garbage skips them here, and in all tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Files with slow tests first, the longest before the others, so that no worker
    starts a long one at the end. Tests marked gpu are skipped where torch sees no CUDA
    device. Those marked vllm see to it themselves: vllm_process.vllm_python.
    """
    if NUM_PARTS:
        others = of_other_parts(items, int(PART), int(NUM_PARTS))
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=[*others])
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: (-SECONDS.get(item.path.name, 0), item.path not in long)
    )
    for item in items:
        if missing := missing_of(item):
            reason = f"no extension {', '.join(missing)}"
            item.add_marker(pytest.mark.skip(reason=reason))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a part of the slow tests have none of a kind, such as vLLM's."""
    if NUM_PARTS and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


class ByFile(LoadGroupScheduling):  # type: ignore[misc]
    """Gives a worker all tests of a group, and of a file: they share imports, fixtures and
    caches. Single tests in turn made each worker pay for all of them.
    """

    def _split_scope(self, nodeid: str) -> str:
        return str(super()._split_scope(nodeid)).partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """Change `--dist loadgroup`."""
    is_grouped = config.getoption("dist") == "loadgroup"
    return ByFile(config, log) if is_grouped else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    """Replace lone surrogates in printed text: it goes from process to process as
    UTF-8, which has none.
    """
    report = yield
    report.sections = [
        (name, text.encode(errors="replace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def environment_of_the_test() -> Iterator[None]:
    """Variables that a test or a library sets are gone for the next test: a fork cannot
    have its own. The client of OpenEnv leaves NO_PROXY behind when two of them connect
    at the same time.
    """
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the tiny Qwen3 (tests/kit/tiny_model.py), seed 0. Read only:
    tests that write make their own.
    """
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def make_step(tiny_model_dir: Path, tmp_path: Path) -> Iterator[MakeStep]:
    """Makes trainers without a process, of the tiny model by default, all with their
    files in tmp_path.
    """
    from trainer_cases import make_spec

    from asyncrl.trainer.model.build_model import use_deterministic
    from asyncrl.trainer.ranks.rank import TrainerRank

    (tmp_path / "staging").mkdir()
    yield lambda model_dir=tiny_model_dir, **values: TrainerRank(
        make_spec(model_dir, tmp_path, **values)
    )
    use_deterministic(is_on=False)


NUM_STEPS = 16


@pytest.fixture(scope="session")
def on_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run at max_staleness 0 with one engine and an evaluation, for
    kills and damages.
    """
    from crash_fuzz import fuzz_config

    evaluation = {
        "task": {"python": "asyncrl.tasks.toy:Letters", "size": 50},
        "every": 6,
    }
    return fuzz_config(
        tmp_path_factory.mktemp("on_policy"),
        eval=evaluation
        | {"num_prompts": 6, "samples": 2, "slots": 4, "temperature": 1.0},
        trainer={
            "num_steps": NUM_STEPS,
            "micro_batch_tokens": 32,
            "logprob_gap_limit": 1e-4,
        },
        observe={"trackers": ["tensorboard"]},
    )


@pytest.fixture(scope="session")
def whole(on_policy: Path) -> Path:
    """The directory of that run with two engines and batches that are trained once they
    are whole, never killed; its output is in said.txt next to it.
    """
    from crash_fuzz import never_killed
    from job_runs import variant

    return never_killed(
        variant(
            on_policy,
            on_policy.parent / "whole",
            rollout={"num_engines": 2},
            trainer={"stream": "off"},
        ),
        on_policy.parent / "whole" / "run",
    )


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The vLLM server of all tests that need no special settings (vllm_house.py). At
    its end it is asked to end, and must leave nothing behind.
    """
    from vllm_house import faulty_vllm_house

    from asyncrl.base.signals import END

    with faulty_vllm_house(tmp_path_factory.mktemp("vllm")) as world:
        yield world
        process = world.process
        process.assert_leaves_nothing(lambda: process.process.send_signal(END), 0)
