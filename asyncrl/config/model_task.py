"""Sections `model`, `task`, `generator` and `gateway`: what learns, from what, and how a rollout is run."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from asyncrl.config.sections import DType, FrozenConfig, Port


class ScratchConfig(FrozenConfig):
    """A small model with random weights, made at the start of the run (seeded by `seed`)."""

    architecture: dict[str, Any]
    """Keys of a transformers config, `model_type` included; vocab_size and token ids are filled in."""
    characters: str = Field(min_length=2)
    """Alphabet of the character-level tokenizer: one token a character."""
    has_tool_role: bool = False
    """The chat template knows messages of the role `tool`."""


class ModelConfig(FrozenConfig):
    """Which model learns. Give `path` or `scratch`."""

    path: str | None = None
    """Hugging Face folder or hub id of a causal language model with a chat template."""
    scratch: ScratchConfig | None = None
    """Instead of `path`: architecture and alphabet of a model with random weights."""
    dtype: DType = "auto"
    """Type of the weights in engines and trainer (auto = bfloat16 on CUDA and on a CPU with avx512_bf16 or
    amx_bf16, else float32; the run's config.yaml has what it was, and a run that goes on keeps it)."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's chat template (none = the tokenizer's own)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("give one of model.path (a folder or hub id) and model.scratch (random weights)")
        return self


class TaskConfig(FrozenConfig):
    """Where prompts come from and what scores the answers. Give one of `python`, `files`, `dataset`,
    `reasoning_gym`, `verifiers`.
    """

    python: str | None = None
    """`module:Class` of a task of your own; built with `args` and the run's seed."""
    files: list[str] | None = None
    """JSONL or parquet files, one prompt a row."""
    dataset: str | None = None
    """Hugging Face dataset: hub id or folder."""
    split: str = "train"
    """Split of `dataset`."""
    reasoning_gym: str | None = None
    """Name of a reasoning-gym task; `args` are its own settings, `size` the number of prompts."""
    verifiers: bool = False
    """The tasks of the environment that generator.verifiers names; its rewards are the rewards."""
    replay: str | None = None
    """File of recorded rollouts (`asyncrl serve gateway --record`) to be trained on first, as far as the
    staleness bound lets them.
    """
    size: int = Field(default=1000, ge=1)
    """Number of prompts that a generated task makes (python, reasoning_gym, and a verifiers environment whose
    tasks have no end).
    """
    args: dict[str, Any] = {}
    """Settings of the task itself, passed as they are."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a list of chat messages."""
    answer_column: str | None = "answer"
    """Column with the reference answer, handed to the reward function (none = no such column)."""
    reward: str | None = None
    """`module:function` with (prompt, completion, answer) -> float, or `math` for math-verify. Not for
    python, reasoning_gym and verifiers, which score themselves; with a harness that gives the rewards it may
    be none."""
    system_prompt: str | None = None
    """System message before every prompt (none = no system message)."""
    shuffle: bool = True
    """Seeded shuffle, another one each epoch (false = file order)."""
    reward_pool: Literal["auto", "inline", "thread", "process"] = "auto"
    """Where the reward function runs: inline on the event loop (fast pure functions only), in threads, or in
    processes, which alone can be ended when they hang (auto = process for `math`, thread for all else)."""
    reward_workers: int = Field(default=4, ge=1)
    """Rewards computed at once in `thread` and `process`."""
    reward_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds until a reward counts as a failed rollout (never as a reward of 0)."""

    @property
    def scores_itself(self) -> bool:
        """The reward comes with the prompts."""
        return self.python is not None or self.reasoning_gym is not None or self.verifiers

    @property
    def has_score(self) -> bool:
        """The text of a completion can be scored; if not, each reward must come from the harness."""
        return self.reward is not None or (self.scores_itself and not self.verifiers)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        names = ("python", "files", "dataset", "reasoning_gym", "verifiers")
        sources = self.given(*names)
        if len(sources) != 1:
            given = ", ".join(sources) or "none of them"
            raise ValueError(f"give exactly one of {', '.join(names)} (given: {given})")
        if self.scores_itself and self.reward is not None:
            raise ValueError(f"task.reward is set, but a {sources[0]} task scores itself; remove task.reward")
        if self.verifiers and (given := ", ".join(self.given("args", "system_prompt"))):
            raise ValueError(
                f"{given} does not reach a verifiers environment; its settings are generator.args (the "
                "system prompt: generator.args.taskset.system_prompt, a file)"
            )
        return self


Outcomes = Literal["returned", "posted", "none"]


class GeneratorConfig(FrozenConfig):
    """How a rollout is run. Give one of `python`, `command`, `verifiers`, `remote`; with none of them a
    rollout is one prompt and one completion.
    """

    python: str | None = None
    """`module:function` of an agent: async (task, session) -> reward, Outcome, or None for the task's own
    reward.
    """
    command: list[str] | None = None
    """A program and its arguments: the task as JSON on its standard input, the gateway in OPENAI_BASE_URL and
    OPENAI_API_KEY, the reward on its last line."""
    verifiers: str | None = None
    """Id of a verifiers environment, loaded with `args`; its dataset is the task (task.verifiers)."""
    remote: bool = False
    """Workers elsewhere run the rollouts: `asyncrl work URL`."""
    args: dict[str, Any] = {}
    """Settings of the verifiers environment, or keyword arguments of the python function, passed as they
    are.
    """
    env: dict[str, str] = {}
    """Environment variables of a command, beside PATH, HOME, LANG, TMPDIR and the OPENAI_ ones; it gets no
    others.
    """
    pass_env: list[str] = []
    """Names of environment variables of the run that a command gets, too: a judge's key, say. Their values
    stand in no file of the run.
    """
    outcomes: Outcomes = "returned"
    """Where rewards of a harness count. returned: what the function returns, the last line of the command.
    posted: what the program posts to /v1/outcome, with a key that comes with its task and opens nothing else.
    none: nowhere, the task's own reward alone."""
    give_answer: bool = False
    """Give the harness the `answer` of each prompt, for a reward of its own. What a model's tools run may
    find it there.
    """
    max_output_bytes: int = Field(default=2**20, ge=1024)
    """Most that a command may print; more fails its rollout."""
    workers: PositiveInt = 1
    """Processes that run the rollouts of `python`, `command` and `verifiers`."""
    concurrency: PositiveInt | Literal["auto"] = "auto"
    """Rollouts in flight at once (auto = rollout.slots * rollout.num_engines; more where harnesses wait for
    other things).
    """
    stop: list[str] = []
    """Texts that end a completion, beside the model's end-of-turn token. Of single-turn rollouts; a harness
    gives its own.
    """

    @property
    def is_harness(self) -> bool:
        """Rollouts are run by a harness, over the gateway."""
        return bool(self.python or self.command or self.verifiers or self.remote)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = self.given("python", "command", "verifiers", "remote")
        if len(kinds) > 1 or self.command == []:
            raise ValueError(
                "give at most one of python, command (a program and its arguments), verifiers, remote "
                f"(given: {', '.join(kinds)})"
            )
        kind = kinds[0] if kinds else "none of them"
        for_kinds = {
            "stop": ("none of them",),
            "env": ("command",),
            "pass_env": ("command",),
            "args": ("python", "verifiers"),
            "give_answer": ("python", "command", "verifiers", "remote"),
            "outcomes": ("command", "remote")
            if self.outcomes == "posted"
            else ("python", "command", "verifiers", "remote"),
        }
        for name in self.given(*for_kinds):
            if kind not in for_kinds[name]:
                raise ValueError(
                    f"generator.{name} is for a generator with {' or '.join(for_kinds[name])}, and it has "
                    f"{kind} of python, command, verifiers, remote; remove it"
                )
        if both := sorted(set(self.env) & set(self.pass_env)):
            raise ValueError(f"env and pass_env both give {', '.join(both)}; remove it from one of them")
        return self


class GatewayConfig(FrozenConfig):
    """The OpenAI-compatible endpoint that harnesses call; open where a generator needs it, and under `asyncrl
    serve gateway`.
    """

    host: str = "127.0.0.1"
    """Address to listen on. Anything but 127.0.0.1 lets other machines in; sessions and workers still need
    their keys.
    """
    port: Port | None = None
    """Port to listen on (none = any free one)."""
    public_url: str | None = None
    """Address under which harnesses on other machines reach it, e.g. http://trainer-host:8700 (none =
    http://host:port).
    """
    model_name: str | None = None
    """Name in /v1/models (none = the last part of model.path, or `policy`). A call may name any model and
    gets this one.
    """
    on_sampling_override: Literal["use_config", "refuse"] = "use_config"
    """A call that asks for another temperature or top_p than training has: give it the configured one (logged
    once), or 400.
    """
    tool_format: str = "auto"
    """How the model writes tool calls: hermes, llama, none, or `module:function` of your own, parse(text) ->
    [(name, arguments), ...] or None (auto = from the chat template)."""
    max_calls: int = Field(default=256, ge=1)
    """Calls that one rollout may make, 16 times as many with a key of `asyncrl serve gateway`; the next one
    gets 429.
    """
    max_concurrent_calls: int = Field(default=16, ge=1)
    """Answers of one rollout that are sampled at once: a call with n counts n times. One more gets 429."""
    max_rollout_tokens: int | None = Field(default=2**18, ge=1)
    """Tokens of all branches of one rollout together, which the trainer reads whole: context that branches
    share counts in each. A rollout with more fails, and its calls get 410 (none = no limit)."""
    max_body_bytes: int = Field(default=2**22, ge=2**10)
    """Largest body of a call; a larger one gets 413."""
    read_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds in which a client must have sent its whole request."""
    max_connections: int = Field(default=8192, ge=1)
    """Connections open at once. One more takes the place of an idle one of whoever holds most, or gets
    503.
    """
    lease_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life until a worker is taken for gone and its rollouts fail."""
