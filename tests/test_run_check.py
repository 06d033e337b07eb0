"""What cannot run is refused by `asyncrl check`, and by a run before it has started a
process.
"""

from __future__ import annotations

import io
import json
import re
import resource
import sys
import textwrap
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from followed_ways import Typed, dead_ends, parts_of, split, ways_of_errors
from job_runs import ROOT, write_config
from launch_cases import single_node
from tiny_model import SHAPE

from asyncrl import cli
from asyncrl.base.errors import ConfigError
from asyncrl.base.user_code import load_object
from asyncrl.config import load_config
from asyncrl.config.load import load_any
from asyncrl.job.check.config_check import check_lines, validate
from asyncrl.job.lifecycle import FEW_FILES, refuse_few_files
from asyncrl.job.loop import run_job
from asyncrl.job.resume import _refuse_changes
from asyncrl.launch.machine import Machine
from asyncrl.models.support import find_support
from asyncrl.trainer.model import model_folder

MODULE = """
    import json, os, threading
    def few(tokens): return tokens
    def advantage(reward_B): return reward_B
    async def agent(task): return 1.0
    async def right_agent(task, session): return 1.0
    def parse(): return None
    def text(prompt, completion, answer): return "1.0"
    def none(prompt, completion, answer): print(completion)
    def same(prompt, completion, answer): return 0.5
    def fails(prompt, completion, answer): return 1 / len(completion)
    def each(prompt, completion, answer, *, sampled): return [1.0 for _ in sampled.token_ids]
    def raises(prompt, completion, answer): raise KeyError(answer)
    def listed(prompt, completion, answer): return [1.0]
    def huge(prompt, completion, answer): return 10**400
    def right(prompt, completion, answer): return 1.0 if completion == answer else None
    def pair(prompt, completion, answer): return 1.0, {"x": 1}
    def length(prompt, completion, answer): return float(len(answer) == len(completion))
    def ends(prompt, completion, answer): os._exit(0)
    def changes(prompt, completion, answer): json.dumps = None; return len(completion)
    async def blocks(prompt, completion, answer): threading.Event().wait()
    class Broken:
        def __init__(self, size, seed): pass
        def __len__(self): return 1
        def prompt(self, index): return {}["x"]
        def score(self, prompt, completion): return 0.0
"""
FOLDER = {
    "mine_here.py": MODULE,
    "fails_here.py": "x = 1\nraise KeyError(x)",
    "torn_here.py": "def score(:",
    "exits_here.py": "import sys\nsys.exit(0)",
    "leaves_here.py": "import os\nos._exit(0)",
    "leaves_later.py": "import os\ndef f(**_): os._exit(0)",
    "skips_here.py": "import pytest\npytest.skip('old', allow_module_level=True)",
    "odd_type/config.json": '{"model_type": "qwen33"}',
    "odd_type/model.safetensors": "",
    "cut/config.json": '{"model_type": "qwen3"}',
    "cut/model.safetensors": "\x40" + 7 * "\0" + "{}",
    "mute/config.json": '{"model_type": "qwen3", "vocab_size": 32}',
    "mute/model.safetensors": "\x02" + 7 * "\0" + "{}",
    "a_teacher/config.json": '{"model_type": "bloom"}',
    "refuses.jinja": "{{ raise_exception('no chats') }}",
    "broken.jinja": "{% for message in messages %}{{ message['content'] }}",
    "mixed.jsonl": "".join(f'{{"prompt": "{n}", "answer": "a"}}\n' for n in range(30))
    + '{"prompt": "abc", "answer": 5}\n{"prompt": "abc", "answer": null}\n',
    "system.jsonl": '{"prompt": [{"role": "system", "content": "abc"}, {"role": "user", "content": "abc"}], '
    '"answer": "a"}',
    "repeats.jsonl": '{"prompt": "abc", "answer": "a"}\n' * 5,
    "empty.jsonl": "",
    "rows.jsonl": '{"prompt": "abc", "answer": "a"}\n{"prompt": "abcd", "answer": "a"}\n',
}
FILES: dict[str, Any] = {"python": None, "files": ["rows.jsonl"], "reward": "math"}

REFUSED = r"""
model.scratch=none model.path=models/typo -> models/typo: there is no such folder
model.scratch=none model.path=odd_type -> odd_type has model_type=qwen33, which transformers does not know
model.scratch=none model.path=cut -> cannot read cut/model.safetensors: SafetensorError
model.scratch=none model.path=mute -> cannot load a tokenizer from ... tokenizer.json
model.scratch.architecture={model_type: deepseek_v32} -> the embedded engine refuses ... rollout.engine=vllm
model.scratch.architecture=MBART -> the embedded engine refuses mbart models: ... rollout.engine=vllm
teacher.path=a_teacher algorithm.distill_weight=1 -> refuses bloom models ... set teacher.engine=vllm
model.scratch.architecture.hiden_size=3 -> does not know hiden_size ... hidden_size?
model.scratch.architecture.hidden_act=nonesuch -> cannot load the model model.scratch.architecture
trainer.lora={targets: [nonesuch]} -> has no layer nonesuch => trainer.lora={targets: [q_proj]}
task.python=none task.files=[rows.jsonl] task.reward=mine_here:text -> mine_here:text returned '1.0'
task.python=none task.files=[rows.jsonl] task.reward=mine_here:none -> is a `return` missing?
task.python=none task.files=[rows.jsonl] task.reward=mine_here:ends -> ended its process (exit code 0)
task.python=none task.files=[rows.jsonl] task.reward=skips_here:x -> cannot be loaded: Skipped: old
task.python=none task.files=[rows.jsonl] task.reward=mine_here:pair -> returned (1.0, {'x': 1}) (tuple), not
task.python=none task.files=[rows.jsonl] task.reward=./mine_here.py:same -> write task.reward=mine_here:same.
ROWS task.reward=/else/x.py:f -> and start asyncrl in /else. => task.reward=mine_here:same
task.python=none task.files=[rows.jsonl] task.reward=fails_here:f -> Way out: correct fails_here.py line 2.
task.python=none task.files=[rows.jsonl] task.reward=torn_here:f -> torn_here.py line 1.
task.python=none task.files=[rows.jsonl] task.reward=mine_here:listed -> returned 1 rewards for 0 sampled
task.python=none task.files=[rows.jsonl] task.reward=mine_here:huge -> returned 1000 ... 1e+18 at most
task.python=none task.files=[empty.jsonl] task.reward=math -> the task has no prompts; it reads empty.jsonl
task.python=none task.files=[rows.jsonl] task.reward=math task.split=b -> task.split=b is for task.dataset
task.python=none task.dataset=rows.jsonl task.reward=math -> is a file ... write task.files=[rows.jsonl]
task.python=none task.files=[rows.jsonl] task.reward=sys:score -> or correct the name.
task.python=none task.files=[rows.jsonl] task.reward=random:score -> (random is ... random.py)
observe.trackers=[wandb] observe.tracker_args.wandb.projekt=x -> give only its parameters: project, tags
eval.task.files=[nope.jsonl] eval.task.reward=math -> eval.task.files: nope.jsonl is not a file
model.scratch.characters=abc -> add them to model.scratch => model.scratch.characters='abcdefgh0123456789 '
rollout.max_tokens=4096 -> max_position_embeddings=128 ... at most 128 => rollout.max_tokens=112
algorithm.loss=mine_here:few -> few(tokens) cannot be called as loss(tokens, settings): too many
algorithm.advantage=nomod:x -> advantage=nomod:x cannot be loaded: ModuleNotFoundError: No module
algorithm.advantage=mine_here:advantage -> (reward_B) cannot be called as advantage(reward_B, group_B)
generator.python=mine_here:agent -> agent(task) cannot be called as (task, session)
generator.command=[./nothere.sh] -> generator.command: there is no program ./nothere.sh
generator.python=x:f generator.worker_python=no/python -> worker_python=no/python: there is no such program
gateway.tool_format=mine_here:parse -> parse() cannot be called as parse(text)
model.chat_template=broken.jinja -> model.chat_template=broken.jinja line 1:
model.chat_template=refuses.jinja generator.command=[/bin/true] -> cannot render ... no chats
generator.command=[/bin/true] generator.pass_env=[NOT_SET_HERE] -> generator.pass_env names NOT_SET_HERE
task.python=exits_here:f -> task.python=exits_here:f cannot be loaded: SystemExit: 0
task.python=leaves_here:f -> leaves_here:f cannot be loaded: SystemExit: os._exit(0) was called
task.python=leaves_later:f -> leaves_later:f ... os._exit(0) was called (leaves_later.py line 2)
task.python=none task.reasoning_gym=chain_sums -> reasoning_gym=chain_sums ... not registered
trainer.router_aux_loss=0.1 -> for a Qwen ... set trainer.router_aux_loss=auto, or 0
observe.trackers=[no_such:Mine] -> No module named 'no_such'
rollout.max_prompt_tokens=3 -> of the first 100 prompts ... are longer than rollout.max_prompt_tokens=3
generator.command=[/bin/true] gateway.tool_format=nope -> is not known => gateway.tool_format=auto
ROWS task.args.x=1 -> and files have no settings ... remove task.args
ROWS task.prompt_column=x -> set task.prompt_column and => task.prompt_column=prompt
EVAL -> is above the 2 prompts of its task ... set eval.num_prompts=2
eval=[{task: {files: [rows.jsonl], reward: 'mine_here:length'}}] -> set eval.num_prompts=2
EVAL eval.num_prompts=2 eval.task.prompt_column=x -> eval.task.prompt_column => eval.task.prompt_column=prompt
ROWS task.files=[system.jsonl] task.system_prompt=abc -> remove task.system_prompt, or the message
task.python=mine_here:Broken generator.python=mine_here:right_agent -> prompt ... raised KeyError: 'x'
"""
# Of a type outside of docs/models.csv: the engine itself is asked.
MBART = (
    "{model_type: mbart, d_model: 32, decoder_layers: 2, decoder_attention_heads: 4, "
    "decoder_ffn_dim: 64, max_position_embeddings: 128}"
)
WORDS = {
    "MBART": MBART,
    "ROWS": "task.python=none task.files=[rows.jsonl] task.reward=mine_here:length",
    "EVAL": "eval.task.files=[rows.jsonl] eval.task.reward=mine_here:length",
}
for word, meant in WORDS.items():
    REFUSED = re.sub(rf"\b{word}\b", meant, REFUSED)
CASES = REFUSED.strip().splitlines()
"""SETTINGS -> words that are said, parts apart by ... => WAY | WAY (test_ways_out.py)."""


def settings_of(line: str) -> list[str]:
    return re.findall(r"\S+?=(?:\[.*?\]|\{.*?\}|\S+)", line)


def is_said(words: str, text: str) -> bool:
    return all(part.strip() in text for part in words.split(" ... "))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules, data, and folders that are nearly models."""
    for name, text in FOLDER.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            line,
            marks=[pytest.mark.extras] * ("reasoning_gym" in line)
            # two processes, which import torch and try the model
            + [pytest.mark.slow] * (MBART in line),
            id=line,
        )
        for line in CASES
    ],
)
def test_check_refuses_what_cannot_run_and_takes_its_way_out(
    line: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mistake, words, ways = parts_of(line)
    config = write_config(here)

    def check(typed: Typed) -> str | None:
        config.write_text(yaml.safe_dump(typed.file))
        arguments = ["check", str(config), *typed.overrides]
        monkeypatch.setattr(sys, "argv", ["asyncrl", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, 2)
        said = capsys.readouterr().err
        return said if ended.value.code else None

    typed = Typed(yaml.safe_load(config.read_text()), tuple(split(mistake)))
    said = check(typed) or ""
    assert is_said(words, said), said
    assert "Way out: " in said
    assert not dead_ends(typed, check, ways), said


NOT_FOLLOWED = {
    "agents/endpoint/gateway.py": "the port of another program",
    "agents/harness.py": "an agent reads the answer, in a rollout",
    "algorithms/advantages.py": "a function returns no advantages, in a step",
    "job/check/model_check.py": "a teacher with few tokens",
    "job/evaluate.py": "asyncrl eval, which would score",
    "job/sample_export.py": "a run that has deleted its tokens",
    "extensions/scoring/judge.py": "an endpoint that answers",
    "extensions/scoring/teacher.py": "a server of another kind",
    "extensions/ray/ray_launcher.py": "a Ray cluster",
    "extensions/trackers/trace_export.py": "a run that has deleted its tokens",
    "job/serve.py": "asyncrl serve gateway, which would not end",
    "launch/cluster_file.py": "asyncrl launch: test_ways_out.py",
    "launch/plan.py": "a model of experts",
    "extensions/sft/demonstrations.py": "test_sft_data.py",
    "extensions/tinker/serve_tinker.py": "asyncrl serve tinker, which would not end",
    "extensions/tinker/trainer_process.py": "a request of a client",
    "trainer/model/build_model.py": "the trainer's device",
    "models/low_rank.py": "a model without linear layers",
    "trainer/model/model_folder.py": "a quantised model",
}
"""Files whose ways out no line above follows, with what they need."""


@pytest.mark.extension("sft")
def test_each_way_out_with_a_setting_is_followed_or_excused() -> None:
    words = {part for line in CASES for part in parts_of(line)[1].split(" ... ")}
    ways = list(ways_of_errors())
    left = {
        way.place.partition(":")[0]
        for way in ways
        if not any(part in way.shown for part in words if len(part) > 14)
    }
    assert left == set(NOT_FOLLOWED)
    assert len(ways) > 20


MOE = "model.scratch.architecture={model_type: %s, hidden_size: 32, num_attention_heads: 4%s}"


@pytest.mark.parametrize(
    ("setting", "balance"),
    [
        (MOE % ("qwen3_moe", ""), ["auto is 0.001"]),
        (MOE % ("mixtral", ", router_aux_loss_coef: 0.02"), ["auto is 0.02"]),
        (MOE % ("deepseek_v3", ""), ["auto is off"]),
        (MOE % ("mixtral", "") + " trainer.router_aux_loss=0.3", ["0.3"]),
        ("seed=1", []),
    ],
)
def test_check_prints_the_balance_of_experts(
    here: Path, setting: str, balance: list[str]
) -> None:
    config = load_config(write_config(here), settings_of(setting))
    lines = check_lines(config, single_node())
    starts = "trainer.router_aux_loss: "
    found = [line for line in lines if line.startswith(starts)]
    assert found == [starts + text for text in balance]


@pytest.mark.slow
def test_a_run_asks_the_engine_about_a_type_outside_of_the_table(here: Path) -> None:
    sizes = "n_embd: 32, n_layer: 2, n_head: 4, n_positions: 128"
    for architecture in (f"{{model_type: gpt-sw3, {sizes}}}", MBART):
        setting = f"model.scratch.architecture={architecture}"
        assert not find_support(architecture.split()[1].rstrip(","))
        config = load_config(write_config(here), [setting])
        if architecture != MBART:
            validate(config)
            continue
        with pytest.raises(ConfigError, match="cannot|differ") as refused:
            validate(config)
        assert refused.value.way_out == "set rollout.engine=vllm."
        validate(load_config(write_config(here), [setting, "rollout.engine=vllm"]))


CONFIGS = Path(__file__).parent.parent / "configs"
FIRST_GPU_RUN = (CONFIGS.parent / "docs/first-gpu-run.md").read_text(encoding="utf-8")
SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers"
    " num_attention_heads num_key_value_heads tie_word_embeddings"
)
HUB = {
    "Qwen/Qwen2.5-7B-Instruct": (152_064, 3584, 18_944, 28, 28, 4, False),
    "Qwen/Qwen2.5-1.5B-Instruct": (151_936, 1536, 8960, 28, 12, 2, True),
    "Qwen/Qwen3-0.6B": (151_936, 1024, 3072, 28, 16, 8, True),
}


@pytest.mark.parametrize(
    "config", sorted(CONFIGS.glob("gsm8k-*.yaml")), ids=lambda path: path.stem
)
def test_a_gpu_config_passes_the_check_in_its_header(
    config: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cached(name: str, file: str, **_: Any) -> str:
        architecture = dict(zip(SIZES.split(), HUB[name], strict=True)) | {
            "head_dim": 128
        }
        architecture |= {"model_type": name[5:10].lower()}
        (here / file).write_text(json.dumps(architecture))
        return str(here / file)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    text = config.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^# +asyncrl (check .* --devices .*)$", text, re.MULTILINE)
    (here / "configs").symlink_to(CONFIGS)
    monkeypatch.setattr(sys, "argv", ["asyncrl", *shown.split()])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    said = capsys.readouterr().out
    if rows := [row for row in FIRST_GPU_RUN.splitlines() if f"/{config.name})" in row]:
        need = re.compile(r"^(cpu|cuda:0|run directory): needs (.*?),", re.MULTILINE)
        needs = dict(need.findall(said))
        cells = [needs[name] for name in ("cuda:0", "cpu", "run directory")]
        assert rows[0].endswith(f"| {' | '.join(cells)} |")
    assert "size unknown" not in said
    assert re.search(
        r"^model: qwen\d: trainer: packed, embedded engine: exact, vllm on a CPU: exact$",
        said,
        re.MULTILINE,
    )


def test_ways_out_of_the_first_gpu_run_need_no_new_run() -> None:
    before = load_config(CONFIGS / "gsm8k-qwen3-0.6b-1gpu.yaml")
    advice = FIRST_GPU_RUN.split("same `--run-dir`:")[1].split("If that is not")[0]
    found = re.findall(r"`([a-z_]+\.[a-z._]+)(?:=(\w+))?`", advice)
    assert len(found) == 5
    for key, value in found:
        now = load_config(
            CONFIGS / "gsm8k-qwen3-0.6b-1gpu.yaml", [f"{key}={value or 16}"]
        )
        assert now != before
        assert not _refuse_changes(before, now, (), Path("run"))


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (
            "mine_here:same",
            "warning: task: the reward mine_here:same does not tell",
        ),
        ("mine_here:fails", "ZeroDivisionError"),
        (
            "mine_here:raises",
            "raises raised KeyError: 'a' (mine_here.py line 13) for each answer",
        ),
        ("mine_here:changes", "{'a': 1.0, '': 0.0}\n"),
        ("mine_here:each", "{'a': 'one per token', '': 'one per token'}\nmodel: "),
        (
            "mine_here:blocks",
            "warning: task: the reward mine_here:blocks takes more than",
        ),
    ],
)
def test_check_shows_the_first_prompt_and_its_rewards(
    reward: str, says: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reward == "mine_here:blocks":
        monkeypatch.setattr("asyncrl.job.check.reward_trial.TRIAL_S", 0.5)
    config = load_config(
        write_config(here, task={**FILES, "reward": reward, "shuffle": False})
    )
    said = "\n".join(check_lines(config, single_node()))
    assert re.search(r"run directory: needs .*, free \d", said)
    assert "the first prompt is '<|user|>abc<|im_end|><|assistant|>'" in said
    assert says in said, said


def test_slow_import_of_user_code_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.base.progress.FIRST_S", 0.01)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    text = "import sys\nwhile 'importing slow_here' not in sys.stderr.getvalue(): pass"
    (here / "slow_here.py").write_text(text)
    with pytest.raises(ConfigError, match="has no attribute 'f'"):
        load_object("slow_here:f", "task.reward")


ROWS = "task.python=none task.reward=mine_here:length task.files=[rows.jsonl]"
HELD_OUT = "eval.num_prompts=2 eval.task.reward=mine_here:length eval.task.files=[FILE]"
DOUBTED = f"""
trainer.lora={{rank: 4}} trainer.learning_rate=9e-6 -> 9e-06 hardly moves LoRA adapters: set it to 1e-05
trainer.lora={{rank: 4}} trainer.learning_rate=1e-5 ->
trainer.learning_rate=0.011 -> 0.011 probably destroys the model: set it to 0.01
trainer.lora={{rank: 4}} trainer.learning_rate=0.011 ->
trainer.num_steps=8 trainer.warmup_steps=9 -> trainer.warmup_steps=9 is above the 8 steps of the run
trainer.num_steps=4 trainer.epochs=2 trainer.warmup_steps=8 ->
buffer.max_staleness=8 buffer.look_ahead=3 -> 3 versions old, and algorithm.loss=ppo_clip learns slowly
buffer.max_staleness=8 buffer.look_ahead=2 ->
buffer.max_staleness=8 buffer.look_ahead=8 algorithm.loss=age_clip ->
buffer.max_staleness=8 buffer.look_ahead=8 algorithm.loss=decoupled_ppo ->
{ROWS.replace("rows", "repeats")} -> task: its 5 rows have 1 different prompts
{ROWS} trainer.num_groups=3 -> num_groups=3: a step repeats some of the 2 rows
{ROWS} trainer.num_groups=2 ->
{ROWS} {HELD_OUT.replace("FILE", "rows.jsonl")} -> eval: its rows are also trained
{ROWS} {HELD_OUT.replace("FILE", "mixed.jsonl")} ->
task.python=none task.reward=mine_here:right task.files=[rows.jsonl] -> returned None ... for '' in a row
{ROWS.replace("rows", "mixed")} -> raised TypeError: ... in a row with the answer None: such rollouts fail
"""


@pytest.mark.parametrize("line", DOUBTED.strip().splitlines())
def test_check_warns_of_what_trains_badly(line: str, here: Path) -> None:
    settings, words = line.split(" ->")
    path = write_config(here, trainer={"num_groups": 2})
    config = load_config(path, settings_of(settings))
    lines = list(check_lines(config, single_node()))
    said = [line for line in lines if "warning" in line]
    assert len(said) == bool(words), said
    assert said == lines[len(lines) - len(said) :], "warnings are last"
    assert is_said(words, "\n".join(said))


@pytest.mark.extension("sft")
def test_check_warns_of_demonstrations_that_train_badly(here: Path) -> None:
    rows = here / "answers.jsonl"
    rows.write_text('{"prompt": "abc", "completion": "a"}\n' * 3)
    config = load_any(
        ROOT / "configs/sft.yaml",
        [f"data.files=[{rows}]", f"data.eval_files=[{rows}]", "trainer.num_groups=4"]
        + ["trainer.warmup_steps=16"],
    )
    said = "\n".join(check_lines(config, single_node()))
    assert "warning: trainer.num_groups=4: a step repeats some of the 3 rows" in said
    assert "warning: data.eval_files: its rows are also trained" in said
    assert "warning: trainer.warmup_steps=16 is above the 15" in said


def test_check_takes_a_config_json_alone_and_stops_at_a_silent_hub(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    monkeypatch.setattr(
        "huggingface_hub.get_session", lambda: calls.append("") or 1 / 0
    )
    machine = Machine((), 8, 2**36, has_bfloat16=False, is_here=False)
    (here / "alone").mkdir()
    (here / "alone/config.json").write_text(json.dumps({**SHAPE, "vocab_size": 32}))
    for path, says in (
        ("alone", "alone has no tokenizer here"),
        ("a/b", "memory is not checked, because a/b"),
    ):
        config = load_config(write_config(here, model={"scratch": None, "path": path}))
        assert says in "\n".join(check_lines(config, single_node(machine)))
    assert len(calls) == 1


@pytest.mark.parametrize(
    "sections",
    [
        {"critic": {"path": "a/b"}, "algorithm": {"advantage": "gae"}},
        {"teacher": {"path": "a/b"}, "algorithm": {"distill_weight": 1.0}},
    ],
)
def test_check_says_which_other_model_it_has_not_seen(
    here: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    monkeypatch.setattr("huggingface_hub.get_session", lambda: 1 / 0)
    config = load_config(write_config(here, **sections))
    said = "\n".join(check_lines(config, single_node()))
    key = next(iter(sections))
    assert f"warning: {key}.path=a/b is not checked, because it is not here" in said


@pytest.mark.parametrize(
    ("thoughts", "says"),
    [
        ("keep", "but later prompts keep the sampled tokens"),
        ("as_template", "and later prompts are its own"),
    ],
)
def test_check_says_how_the_template_changes_answers(
    thoughts: str, says: str, here: Path
) -> None:
    template = resources.files("trl") / "chat_templates/qwen3_6.jinja"
    settings = [f"model.chat_template={template}", f"gateway.thoughts={thoughts}"]
    settings.append("rollout.max_prompt_tokens=64")
    said = "\n".join(validate(load_config(write_config(here), settings)).lines)
    written = f"</think>\\n\\nIt is four.' as 'It is four.', {says}"
    assert written in said


def test_prompts_that_are_too_long_are_reported(here: Path) -> None:
    found = validate(
        load_config(write_config(here, task=FILES, rollout={"max_prompt_tokens": 6}))
    )
    (note,) = found.notes
    assert note.startswith(
        "1 of the first 2 prompts of the task are longer than rollout.max_prompt_tokens=6"
    )
    assert len(found.tasks[""]) == 2


@pytest.mark.parametrize(("missing", "is_refused"), [(1, True), (0, False)])
def test_too_few_open_files_are_refused(
    missing: int, is_refused: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        write_config(here), ["generator.concurrency=300", "rollout.num_engines=2"]
    )
    limits = dict[str, Any]()
    hard = FEW_FILES + 300 - missing
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, hard))
    monkeypatch.setattr(
        resource, "setrlimit", lambda name, pair: limits.update({str(name): pair})
    )
    if not is_refused:
        refuse_few_files(config)
        assert limits == {str(resource.RLIMIT_NOFILE): (hard, hard)}
        return
    with pytest.raises(
        ConfigError, match=f"may open {hard} files, and 300 concurrent"
    ) as refusal:
        run_job(config, here / "run", name="test")
    assert f"ulimit -Hn {hard + 1}" in refusal.value.way_out
    assert not (here / "run").exists()


def test_type_of_the_table_that_this_transformers_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_folder, "find_support", lambda _: ["a row"])
    with pytest.raises(ConfigError, match="qwen99, which transformers does not know"):
        model_folder.check_model_type("qwen99", "the model")
