"""Fixtures that several parts share."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
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


QUARTER = int(os.environ.get("ASYNCRL_QUARTER", "0"))
"""1 to 4 runs that quarter of the slow tests, as CI does by the commit; 0 runs all."""
IN_EACH_QUARTER = ["test_job_resume.py", "test_job_faults.py", "test_pairs.py"]
"""Files that hold the promises of a run that is killed and resumed, and files whose
tests the commit draws.
"""
LONGEST = [
    "test_pairs.py",
    "test_tutorial.py",
    "test_several_hosts.py",
    "test_job_resume.py",
    "test_frameworks.py",
    "test_gpu_acceptance.py",
    "test_experts.py",
]
SLOW = ("slow", "vllm", "gpu", "extras", "long")


def is_marked(item: pytest.Item, *names: str) -> bool:
    return any(item.get_closest_marker(name) is not None for name in names)


def of_other_quarters(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the slow tests that this quarter leaves out.

    Tests of a file share runs and servers, so whole files rotate. Tests marked rotated
    share nothing and rotate one by one, a third in each run.
    """
    alone = [item for item in items if is_marked(item, "rotated")]
    alone.sort(key=lambda item: item.nodeid)
    others = {*alone} - {*alone[(QUARTER - 1) % 3 :: 3]}
    slow = [
        item
        for item in items
        if is_marked(item, *SLOW)
        and not is_marked(item, "rotated")
        and item.path.name not in IN_EACH_QUARTER
    ]
    # The longest files go to different quarters.
    rank = {name: number for number, name in enumerate(LONGEST)}
    names = {item.path.name for item in slow}
    files = sorted(names, key=lambda name: (rank.get(name, len(rank)), name))
    own_files = files[QUARTER - 1 :: 4]
    return others | {item for item in slow if item.path.name not in own_files}


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Files with slow tests first, the longest before the others, so that no worker
    starts a long one at the end. Tests marked gpu are skipped where torch sees no CUDA
    device. Those marked vllm see to it themselves: vllm_process.vllm_python.
    """
    if QUARTER:
        others = of_other_quarters(items)
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=[*others])
    long = {item.path for item in items if item.get_closest_marker("slow")}
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(
        key=lambda item: (rank.get(item.path.name, len(rank)), item.path not in long)
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


class ByFile(LoadGroupScheduling):  # type: ignore[misc]
    """Gives a worker all tests of a group, and of a file: they share imports, fixtures and
    caches. Single tests in turn made each worker pay for all of them.
    """

    def _split_scope(self, nodeid: str) -> str:
        return str(super()._split_scope(nodeid)).partition("::")[0]


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
    """The directory of that run with two engines, never killed; its output is in
    said.txt next to it.
    """
    from crash_fuzz import never_killed
    from job_runs import variant

    return never_killed(
        variant(on_policy, on_policy.parent / "whole", rollout={"num_engines": 2}),
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
