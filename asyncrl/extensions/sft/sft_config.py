"""Settings of supervised fine-tuning (`asyncrl sft`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from asyncrl.base.extensions import rows
from asyncrl.config.checkpoint_config import CheckpointConfig
from asyncrl.config.engineless_config import EnginelessConfig, NoRollouts
from asyncrl.config.fields import Count, FrozenConfig, Seed
from asyncrl.config.job_config import JobConfig
from asyncrl.config.model_config import ModelConfig
from asyncrl.config.observe_config import ObserveConfig
from asyncrl.config.placement_config import PlacementConfig
from asyncrl.config.run_config import RunConfig
from asyncrl.config.supervision_config import SupervisionConfig
from asyncrl.config.trainer_config import TrainerConfig

IGNORED = {
    "trainer": ("mini_batches", "epochs", "logprob_gap_limit", "stream", "roles"),
    "placement": tuple(key for key in PlacementConfig.model_fields if key != "trainer"),
    "checkpoint": ("keep_best",),
    "observe": tuple(rows("listeners")),
}
"""Keys of shared sections that only a run with rollouts reads."""


class DataConfig(FrozenConfig):
    """Demonstrations of `asyncrl sft`: chats whose assistant messages are learned
    (docs/sft.md).
    """

    # Their tokens are pinned by a digest, so a moved file is still the same data.
    free_keys: ClassVar = (
        "files",
        "dataset",
        "split",
        "args",
        "eval_files",
        "eval_every",
    )

    files: list[str] | None = None
    """JSONL or parquet files. A row has `messages`, or `prompt` and `completion`."""
    dataset: str | None = None
    """Hugging Face dataset, instead of `files`: hub id or folder."""
    split: str = "train"
    """Split of `dataset`."""
    args: dict[str, object] = {}
    """Settings of `datasets.load_dataset`."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Maximum tokens of a row (none = the model's max_position_embeddings)."""
    overlong: Literal["refuse", "skip"] = "refuse"
    """Longer rows: refuse the data, or train without them. Rows are never cut."""
    epochs: Count = 1
    """Passes over the rows, each in another order, by the seed."""
    eval_files: list[str] | None = None
    """Files with held-out rows, whose loss is measured (none = off)."""
    eval_every: PositiveInt | None = None
    """Steps between two of these measurements (none = after each epoch). The last
    weights are always measured.
    """

    def conflicts(self) -> Iterator[str]:
        if (self.files is None) == (self.dataset is None):
            yield "give either data.files or data.dataset"


class SftTrainerConfig(TrainerConfig):
    """The optimizer steps; num_groups is the number of rows of each."""

    num_steps: NonNegativeInt = 0
    """Maximum number of steps (0 = the steps of data.epochs)."""


class SftConfig(JobConfig):
    """Train on demonstrations (supervised fine-tuning), without engines. RUN_DIR/final
    can be model.path of a run.

    Exit codes and resumes as of `asyncrl run`.

    For example:
      asyncrl sft configs/sft.yaml --run-dir runs/sft
      asyncrl sft configs/sft.yaml data.epochs=2
    """

    free_keys: ClassVar = ("launcher",)
    about: ClassVar = "supervised fine-tuning"
    command: ClassVar = "sft"
    tag: ClassVar = "sft"
    job: ClassVar = "asyncrl.extensions.sft.sft_job:SftJob"
    check: ClassVar = "asyncrl.extensions.sft.sft_check:check_sft"
    steps_keys: ClassVar = ("trainer.num_steps", "data.epochs")

    seed: Seed = 0
    """Seed of random weights and of the order of rows."""
    launcher: str = RunConfig.model_fields["launcher"].default
    """Launcher of the trainer's processes, as in a run."""
    model: ModelConfig
    """The trained model."""
    data: DataConfig
    """The demonstrations."""
    trainer: SftTrainerConfig = SftTrainerConfig()
    """The optimizer steps."""
    placement: PlacementConfig = PlacementConfig()
    """Devices of the trainer."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    supervision: SupervisionConfig = SupervisionConfig()
    """Restarts of the trainer, and reports of hangs."""
    observe: ObserveConfig = ObserveConfig()
    """Files, trackers, console and status port."""

    def as_run(self, num_steps: int = 0, max_tokens: int = 1) -> EnginelessConfig:
        """Return the settings of a job whose steps are `num_steps`. `max_tokens`: of the
        longest row.
        """
        num_steps = num_steps or self.trainer.num_steps or 1
        shared = {name: value for name, value in self if name != "data"}
        shared["trainer"] = self.trainer.model_copy(update={"num_steps": num_steps})
        return EnginelessConfig(
            **shared,
            rollout=NoRollouts(max_tokens=max_tokens),
        )

    def conflicts(self) -> Iterator[str]:
        for section, keys in IGNORED.items():
            for key in getattr(self, section).given(*keys):
                yield f"{section}.{key} has no effect on supervised fine-tuning; remove it"
        try:
            self.as_run()
        except ValidationError as error:
            message = str(error.errors()[0]["msg"])
            yield message.removeprefix("Value error, ")
