"""The pages: commands parse, configs load, settings and files exist, the site builds."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from job_runs import run
from needed_extensions import NAMED
from page_blocks import blocks
from printed_texts import (
    DOTTED,
    IS_FILE,
    NO_SETTINGS,
    OF_THE_EXAMPLE,
    fields_named,
    parse,
)
from tiny_model import SHAPE

from asyncrl import __version__
from asyncrl.base.errors import AsyncrlError
from asyncrl.config import RunConfig, load_any, load_config
from asyncrl.config.load import sections

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "benchmarks", "skills")
PATTERNS = ("*.md", *(f"{folder}/**/*.md" for folder in FOLDERS))
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
PLACEHOLDERS = {
    "CONFIG": QUICKSTART,
    "config.yaml": QUICKSTART,
    "N": "1",
    "URL": "http://127.0.0.1:8700",
}
OF_A_READER = ("my_task.yaml", "my_agent.yaml", "quickstart.yaml")
PLACEHOLDERS |= dict.fromkeys(OF_A_READER, QUICKSTART)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> Iterator[str]:
    """Yield the lines of shell blocks and of indented blocks that start with our
    programs.
    """
    text = page.read_text(encoding="utf-8")
    lines = [
        line
        for block in blocks(page, "sh", "bash", "console")
        for line in block.splitlines()
    ]
    lines += re.findall(
        r"^ {4,}((?:\.venv/bin/)?(?:asyncrl|make|python) .*)$", text, flags=re.M
    )
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    for line in joined.splitlines():
        command = re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))
        command = re.sub(r"^(?:[A-Z][A-Z0-9_]*=\S* +)+", "", command)
        if (
            re.match(r"(?:\.venv/bin/)?(?:asyncrl|make|python) ", command)
            and "..." not in command
        ):
            yield command


@cache
def fault_of(command: str) -> str | None:
    """Return why the command cannot be typed in a checkout, or None."""
    program, *arguments = shlex.split(command)
    if program.endswith("make"):
        done = subprocess.run(
            ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True
        )
        return done.stderr or None
    if program.endswith("python"):
        is_found = arguments[0].startswith("-") or (ROOT / arguments[0]).is_file()
        return None if is_found else f"no file {arguments[0]}"
    try:
        parsed = parse(
            [PLACEHOLDERS.get(word.split("/")[-1], word) for word in arguments]
        )
        if "config" in parsed:
            load_any(ROOT / parsed["config"], parsed.get("overrides") or [])
    except AsyncrlError as error:
        return str(error)
    except Exception as error:  # typer has a private copy of click's exceptions
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_on_a_page_can_be_typed(page: Path) -> None:
    faults = {
        command: fault_of(command)
        for command in commands(page)
        if OF_THE_EXAMPLE not in command
    }
    assert {command: fault for command, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_configs_on_a_page_load(page: Path) -> None:
    base = {"model": {"path": "x"}, "task": {"files": ["x.jsonl"], "reward": "math"}}
    for text in blocks(page, "yaml"):
        block = yaml.safe_load(text)
        if isinstance(block, dict) and set(block) <= set(RunConfig.model_fields):
            RunConfig.model_validate(base | block)


def test_the_first_page_shows_the_config_of_its_result() -> None:
    (text,) = blocks(ROOT / "docs/index.md", "yaml")
    shown = RunConfig.model_validate(yaml.safe_load(text))
    path = f"model.path={shown.model.path}"
    measured = load_config(ROOT / "configs/smollm2.yaml", [path, "eval=none"])
    assert (shown, len(text.splitlines())) == (measured, 10)


@pytest.mark.extension(*NAMED)
def test_settings_named_on_pages_exist() -> None:
    # Its left column has the keys of others.
    pages = [page for page in PAGES if page.name != "coming-from.md"]
    named = {
        (name_of(page), name)
        for page in pages
        for quoted in re.findall(
            r"(?<!`)`([^`\n]+)`(?!`)", page.read_text(encoding="utf-8")
        )
        for name in DOTTED.findall(quoted)
        if not IS_FILE.search(name)
    }
    assert len(named) > 100
    unknown = {each for each in named if not fields_named(each[1])}
    assert {each for each in unknown if each[1] not in NO_SETTINGS} == set()


@pytest.mark.extension("vllm")
@pytest.mark.parametrize(
    "framework",
    [
        "TRL",
        "verl",
        "AReaL",
        "SkyRL",
        pytest.param("prime-rl", marks=pytest.mark.extension("verifiers")),
    ],
)
def test_settings_compared_with_other_frameworks_exist(framework: str) -> None:
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {framework}\n")[1].split("\n## ")[0]
    cells = [
        line.split("|")[2] for line in section.splitlines() if line.startswith("| ")
    ][2:]
    named = [name for cell in cells for name in re.findall("`([^`]+)`", cell)]
    assert len(named) > 12
    assert [name for name in named if not fields_named(name)] == []


UNLIKE_ANY_SETTING = frozenset(
    """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_epsilon
    auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16_full_eval
    cache_implementation cast_lm_head_to_fp32 data_seed dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_dropout disable_tqdm
    do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint entropy_coef
    entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target eval_accumulation_steps eval_delay
    eval_do_concat_batches eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config
    full_determinism generation_batch_size generation_kwargs gradient_checkpointing_kwargs greater_is_better
    hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
    include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor length_column_name
    liger_kernel_config load_best_model_at_end local_rank log_completions_hub_repo log_level
    log_level_replica log_multimodal log_on_each_node log_unique_prompts logging_first_step
    logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs metric_for_best_model
    model_init_kwargs neftune_noise_alpha optim optim_args optim_target_modules
    output_dir pad_to_multiple_of parallelism_config per_device_eval_batch_size prediction_loss_only project
    push_to_hub ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_penalty
    restore_callback_states_from_checkpoint resume_from_checkpoint router_aux_loss_coef
    run_name sapo_temperature_neg sapo_temperature_pos save_on_each_node save_only_model save_strategy
    skip_memory_metrics sync_ref_model tf32 torch_compile_backend torch_compile_mode
    torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id
    train_sampling_strategy transformers_continuous_batching_config trust_remote_code use_adaptive_entropy
    use_cache use_cpu use_liger_kernel use_transformers_continuous_batching use_transformers_paged
    vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_group_port vllm_importance_sampling_cap
    vllm_importance_sampling_clip_min vllm_model_impl vllm_server_host vllm_server_port vllm_server_timeout
    vllm_structured_outputs_regex
    """.split()
)
"""Settings of TRL's GRPOConfig without a counterpart."""


def blocks_of(framework: str, language: str) -> list[str]:
    """Return the code blocks of a framework's section."""
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {framework}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def defaults_of(framework: str) -> list[list[str]]:
    """Return rows: their setting, default, our setting, default, difference."""
    (table,) = blocks_of(framework, "text")
    return [
        [cell.strip() for cell in f"{line} ".split(" | ")]
        for line in table.splitlines()[1:]
    ]


@pytest.mark.extension("vllm")
@pytest.mark.parametrize("framework", ["TRL", "verl"])
def test_defaults_compared_with_other_frameworks_are_ours(framework: str) -> None:
    ours = {key.name: key.default for *_, keys in sections() for key in keys}
    rows = defaults_of(framework)
    assert len(rows) > 19
    assert [row for row in rows if ours[row[2]] != row[3]] == []


@pytest.mark.slow
def test_script_of_trl_trains(tiny_model_dir: Path, tmp_path: Path) -> None:
    (script,) = blocks_of("TRL", "python")
    for theirs, ours in (
        ('"Qwen/Qwen3-0.6B"', f'"{tiny_model_dir}"'),
        ('"examples/', f'"{ROOT}/examples/'),
        ("max_steps=200", "max_steps=1, use_cpu=True"),
        ("max_completion_length=128", "max_completion_length=4"),
    ):
        assert theirs in script
        script = script.replace(theirs, ours)
    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=500
    )
    assert (tmp_path / "runs/capitals/checkpoint-1/model.safetensors").is_file()


@pytest.mark.xdist_group("trl")
@pytest.mark.filterwarnings(
    "ignore:.gradient_checkpointing. is deprecated:FutureWarning"
)
def test_defaults_of_trl_are_of_the_installed_version(tmp_path: Path) -> None:
    from trl import GRPOConfig

    theirs = {field.name: field for field in fields(GRPOConfig)}
    keys = {name: key for name, _, key, *_ in defaults_of("TRL")}
    given = {name: default for name, default, *_ in defaults_of("TRL")}
    assert {name: str(theirs[name].default) for name in given} == given
    assert theirs.keys() - UNLIKE_ANY_SETTING == given.keys()
    (script,) = blocks_of("TRL", "python")
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if getattr(call.func, "id", "") == "GRPOConfig"]
    changed = {
        word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg
    }
    changed |= {"output_dir": str(tmp_path), "use_cpu": True}
    asked = GRPOConfig(**changed)
    (text,) = blocks_of("TRL", "yaml")
    (tmp_path / "ours.yaml").write_text(text)
    ours = load_config(tmp_path / "ours.yaml")
    completions = asked.per_device_train_batch_size * asked.gradient_accumulation_steps
    assert completions == ours.trainer.num_groups * ours.rollout.group_size
    assert ours.trainer.betas == (asked.adam_beta1, asked.adam_beta2)
    equal = (
        "num_generations max_completion_length max_steps learning_rate"
        " lr_scheduler_type epsilon epsilon_high save_steps seed"
    )
    for name in equal.split():
        assert getattr(asked, name) == attrgetter(keys[name])(ours), name


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["TRL", "verl"])
def test_a_translated_config_trains_a_step(framework: str, tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(blocks_of(framework, "yaml")[-1])
    scratch = {
        "architecture": SHAPE | {"max_position_embeddings": 512},
        "characters": string.printable[:95],
    }
    tiny = [
        "model.path=none",
        f"model.scratch={json.dumps(scratch)}",
        "rollout.engine=embedded",
    ]
    few = [
        "trainer.num_steps=1",
        "trainer.num_groups=2",
        "rollout.max_tokens=4",
        "placement.trainer=cpu",
    ]
    done = run(
        tmp_path / "ours.yaml", tmp_path / "run", *tiny, *few, "placement.rollout=cpu"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.extras
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "configuration/rollout.html").read_text(encoding="utf-8")
    assert re.search(rf"\s+asyncrl {re.escape(__version__)}\s", page)
    assert "rollout.<wbr>max_<wbr>prompt_<wbr>tokens" in page
