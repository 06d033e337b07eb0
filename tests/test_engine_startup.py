"""An embedded engine refuses bad models and sizes at its start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_in_process import answered, make_qwen3, make_spec, running_engine
from launch_cases import EVAL, NO_TOKENS, OWN, load, machine, single_node
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_moe
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.base.errors import ErrorBody, find_fatal
from asyncrl.engines.kinds import engine_role
from asyncrl.job.roles import EVAL_ENGINE, extra_servers
from asyncrl.job.servers import ServerFactory
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.plan import make_plan
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.embedded_engine import (
    build_engine,
    check_determinism,
    check_same_model,
)
from asyncrl_servers.embedded.kv_attention import NO_INTS, Ints
from asyncrl_servers.embedded.row_adapters import Adapter
from asyncrl_servers.embedded.runner import PREFILL_ROWS, Job, Runner, cut_calls

ISA = "ONEDNN_MAX_CPU_ISA"

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"max_position_embeddings": 512, "eos_token_id": None}


def save_model(folder: Path, kind: str, **sizes: Any) -> None:
    config = AutoConfig.for_model(kind, **SIZES | sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def refusal_of(
    capfd: pytest.CaptureFixture[str],
    call: Callable[..., object],
    *of: Any,
    **named: Any,
) -> ErrorBody:
    with pytest.raises(SystemExit, match="1"):
        call(*of, **named)
    fatal = find_fatal(capfd.readouterr().err)
    assert fatal is not None
    assert fatal.way_out
    return fatal


def test_damaged_weights_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_qwen3(tmp_path / "model", num_hidden_layers=1)
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert (
        "model.norm.weight" in refusal_of(capfd, build_engine, make_spec(folder)).error
    )
    weights.write_bytes(weights.read_bytes()[:2000])
    assert (
        "cannot load the model"
        in refusal_of(capfd, build_engine, make_spec(folder)).error
    )


@pytest.mark.parametrize(
    ("of", "overrides", "name"),
    [
        ("quickstart", [], "engine-0"),
        ("quickstart", [EVAL, OWN], EVAL_ENGINE),
        ("agent", [], "engine-0"),
    ],
)
def test_the_plan_counts_the_cache_and_weights_of_the_server(
    of: str, overrides: list[str], name: str, tmp_path: Path
) -> None:
    folder = make_qwen3(tmp_path / "model")
    of_model = ["model.scratch=none", f"model.path={folder}", "rollout.max_tokens=50"]
    config = load(*of_model, *overrides, name=of)
    plan = make_plan(config, single_node(machine(0)), extra_servers(config))
    factory = ServerFactory(
        config, plan.placement, folder, NO_TOKENS, folder, LocalLauncher()
    )
    role = extra_servers(config).get(name, engine_role(config))
    order = factory.order(role, name, plan.placement.engines[0][0])
    spec = EmbeddedSpec(**{**role.maker.spec(order), "deterministic": False})
    engine = build_engine(spec)
    counted = next(process.memory for process in plan.processes if process.name == name)
    assert counted.kv == pytest.approx(engine.runner.cache.num_bytes, rel=0.1)
    assert counted.copies == pytest.approx(engine.weights.num_bytes, rel=0.01)


def test_a_length_that_changes_the_rotary_table_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    save_model(
        tmp_path / "model", "llama", max_position_embeddings=64, rope_parameters=rope
    )
    fatal = refusal_of(
        capfd, build_engine, make_spec(tmp_path / "model", max_length=65)
    )
    assert "type dynamic change above 64 tokens" in fatal.error
    assert "rollout.engine=vllm" in fatal.way_out
    build_engine(make_spec(tmp_path / "model", max_length=64))


def test_the_check_at_start_finds_other_logits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = build_engine(
        make_spec(make_qwen3(tmp_path / "model", num_hidden_layers=1))
    )
    engine.runner.loaded.reference_logits = engine.runner.loaded.reference_logits.roll(
        1, dims=0
    )
    assert "differ from" in refusal_of(capfd, check_same_model, engine.runner).error


def test_a_model_with_experts_starts_at_the_defaults(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_moe(tmp_path / "model")
    with running_engine(folder) as engine:
        assert len(answered(engine).token_ids) == 20
    refusal = refusal_of(capfd, build_engine, make_spec(folder, deterministic=True))
    assert "logits depend on" in refusal.error
    assert "rollout.deterministic=auto" in refusal.way_out


def disturb(runner: Runner, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """Let the runner's products round as these kernels do."""
    step = runner.step

    def disturbed(
        jobs: Sequence[Job],
        last_ids: Ints = NO_INTS,
        lengths: Ints = NO_INTS,
        adapters: Sequence[Adapter] = (),
    ) -> Tensor:
        logits = step(jobs, last_ids, lengths, adapters)
        rounds = {
            "a decoded row differs": len(last_ids) > 0,
            "a full batch differs": len(last_ids) + len(jobs) > 2,
        }
        return logits + 1e-3 if rounds[kernels] else logits

    monkeypatch.setattr(runner, "step", disturbed)


@pytest.mark.parametrize(
    ("kernels", "cause"),
    [
        ("a decoded row differs", "decoded alone, or prefilled with its prompt"),
        ("a full batch differs", r"others in the batch \(0 and 3\)"),
    ],
)
def test_the_check_at_start_names_what_changes_the_logits(
    kernels: str,
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = make_qwen3(tmp_path / "model", num_hidden_layers=1)
    engine = build_engine(make_spec(folder))
    assert engine.health().note == ""
    disturb(engine.runner, monkeypatch, kernels)
    wanted = make_spec(folder, deterministic=True)
    own = [*engine.runner.loaded.adapters.values()]
    refusal = refusal_of(capfd, check_determinism, engine.runner, wanted, own)
    assert re.search(cause, refusal.error)
    # The model is in float32 and has one thread: neither is a way out.
    assert refusal.way_out == "set rollout.deterministic=auto."
    check_determinism(engine.runner, make_spec(folder), own)
    assert not engine.runner.is_exact
    assert re.search(f"auto is false here: .*{cause}", engine.health().note)


def started(folder: Path, kernels: str) -> tuple[list[str], ErrorBody | None]:
    """Start engines with deterministic=auto and then true in another process, since
    oneDNN chooses its kernels once. Return the notes, and the error of the last start.
    """
    code = (
        "import sys; from asyncrl_servers.embedded import decoder, embedded_engine as made\n"
        "for line in sys.stdin:\n"
        "    spec = decoder.EmbeddedSpec.model_validate_json(line)\n"
        "    print('note:', made.build_engine(spec).health().note)"
    )
    how: dict[str, Any] = {"dtype": "bfloat16", "slots": 20}
    specs = [make_spec(folder, deterministic=one, **how) for one in ("auto", True)]
    env = {name: text for name, text in os.environ.items() if name != ISA}
    child = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(spec.model_dump_json() for spec in specs),
        env=env | ({ISA: kernels} if kernels else {}),
        capture_output=True,
        text=True,
    )
    fatal = find_fatal(child.stderr)
    assert child.returncode == 0 or fatal is not None, child.stderr
    return re.findall("^note: (.*)$", child.stdout, re.MULTILINE), fatal


@pytest.mark.slow
def test_a_model_of_smollm2_s_shape_starts_in_bfloat16(tmp_path: Path) -> None:
    """oneDNN's AMX kernels round a decoded token unlike a prefilled one. A start avoids
    them, unless the environment asks for them.
    """
    sizes: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 576}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    # With these weights AMX fails the check.
    torch.manual_seed(0)
    sizes |= heads | {"intermediate_size": 1536, "initializer_range": 0.04}
    save_model(tmp_path / "model", "llama", **sizes)
    assert started(tmp_path / "model", "") == (["", ""], None)
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    if "amx_bf16" not in flags:
        return
    (note,), fatal = started(tmp_path / "model", "AVX512_CORE_AMX")
    assert note.startswith("rollout.deterministic: auto is false here")
    assert fatal is not None
    assert "decoded alone, or prefilled" in fatal.error
    assert "threads" not in fatal.way_out


def test_part_longer_than_a_call_is_a_call_of_its_own() -> None:
    """Without chunks a prompt is one part, however long it is."""
    long, short = np.zeros(PREFILL_ROWS + 1, np.int64), np.zeros(5, np.int64)
    for jobs in ([(0, long, 0), (1, short, 0)], [(1, short, 0), (0, long, 0)]):
        calls = cut_calls(jobs, query_chunk=10 * PREFILL_ROWS)
        assert [[part[0] for part in parts] for parts in calls] == [
            [jobs[0][0]],
            [jobs[1][0]],
        ]
