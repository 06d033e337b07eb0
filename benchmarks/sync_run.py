"""Runs `sync_reference`, the plain synchronous loop, on a config: one process, no HTTP,
no buffer, no producers.

    python benchmarks/sync_run.py CONFIG [key=value ...] --run-dir DIR

Writes metrics.jsonl (step, time_s, reward/mean, and what the trainer says),
trained.jsonl and final/, as `asyncrl run` does, so that the two can be laid over each
other: at max_staleness 0 they must agree bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from engine_replies import ask
from sync_reference import SyncParts, sync_reference

from asyncrl.config import RunConfig, load_config
from asyncrl.engines.kinds import embedded_spec, engine_role
from asyncrl.job.agent_runtime import special_tokens
from asyncrl.job.servers import ServerFactory
from asyncrl.launch.launchers import LocalLauncher
from asyncrl.launch.parts import part_tokens
from asyncrl.launch.plan import plan_run, resolve_auto
from asyncrl.launch.processes import run_module
from asyncrl.messages.engine_api import CommitRequest, PrepareRequest
from asyncrl.messages.records import Batch, Completion, Prompt
from asyncrl.messages.sampling import SamplingRequest
from asyncrl.messages.trainer_api import TrainResponse
from asyncrl.messages.worker_api import answer_text
from asyncrl.observe.metrics import batch_metrics
from asyncrl.rollouts.rollout import derive_seed
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.tasks.prompt_source import PromptSource, TaskPrompts
from asyncrl.tasks.sources import build_task
from asyncrl.trainer.model.model_folder import make_model_folder
from asyncrl.trainer.ranks.rank import TrainerRank
from asyncrl.trainer.trainer_client import pack_groups
from asyncrl_servers.embedded.decoder import EmbeddedSpec
from asyncrl_servers.embedded.embedded_engine import Engine, build_engine


class SyncRun:
    """The parts of sync_reference for one config: engine and trainer of the product, in
    this process, called in turn.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, *, one_by_one: bool = False
    ) -> None:
        config, _ = resolve_auto(config, LocalLauncher().nodes)
        self.config, self.run_dir, self.one_by_one = config, run_dir, one_by_one
        run_dir.mkdir(parents=True, exist_ok=True)
        model_path = asyncio.run(make_model_folder(config, run_dir, run_module))
        self._staging = tempfile.TemporaryDirectory(prefix="sync-run-")
        plan, _ = plan_run(config, LocalLauncher().nodes)
        placement = plan.placement
        self.part_tokens = part_tokens(config, placement)
        self.tokenizer = HFChatTokenizer(
            model_path, chat_template=config.model.chat_template
        )
        servers = ServerFactory(
            config, placement, model_path, self.tokenizer, run_dir, LocalLauncher()
        )
        self.trainer = TrainerRank(servers.trainer_spec(0, Path(self._staging.name)))
        self.engine: Engine = build_engine(
            EmbeddedSpec.model_validate(
                embedded_spec(
                    servers.order(
                        engine_role(config), "engine-0", placement.engines[0][0]
                    )
                )
            )
        )
        self.engine.start()
        self.special_tokens = special_tokens(config, self.tokenizer)
        self.task = build_task(config.task, config.seed)
        self.feed = PromptSource(
            TaskPrompts(
                self.task,
                seed=config.seed,
                shuffle=config.task.shuffle,
                system_prompt=config.task.system_prompt,
            )
        )

    def parts(self) -> SyncParts:
        return SyncParts(
            next_prompt=self.feed.next_nowait,
            encode=self.tokenizer.encode_chat,
            derive_seed=lambda prompt_id, sample: derive_seed(
                self.config.seed, prompt_id, sample, 0
            ),
            generate=self.generate,
            decode=partial(answer_text, self.tokenizer, shows_special=True),
            score=self.score,
            train=self.train,
            load_weights=self.load_weights,
        )

    def generate(
        self, requests: Sequence[tuple[Sequence[int], int]]
    ) -> list[Completion]:
        """A completion for each (prompt ids, seed): all at once, or strictly one after
        the other.
        """
        if self.one_by_one and len(requests) > 1:
            return [
                completion
                for request in requests
                for completion in self.generate([request])
            ]
        rollout = self.config.rollout
        asked = [
            SamplingRequest(
                request_id=f"sync-{index}",
                prompt_ids=prompt_ids,
                max_tokens=rollout.max_tokens,
                temperature=rollout.temperature,
                stop=tuple(self.config.generator.stop),
                seed=seed,
            )
            for index, (prompt_ids, seed) in enumerate(requests)
        ]
        answers = [answer.result(timeout=600) for answer in ask(self.engine, asked)]
        return [
            Completion(answer.tokens, finish_reason=answer.finish_reason)
            for answer in answers
            if answer.finish_reason != "abort"
        ]

    def score(self, prompt: Prompt, completion: str) -> float:
        return float(self.task.score(prompt, completion))  # type: ignore[arg-type]

    def train(self, batch: Batch) -> TrainResponse:
        metrics = self.trainer.train(*pack_groups(batch))
        return TrainResponse(
            policy_version=self.trainer.policy_version, metrics=metrics
        )

    def load_weights(self, version: int) -> None:
        """Export, stage, swap, one after the other."""
        path = Path(self._staging.name) / f"v{version}.safetensors"
        export = self.trainer.begin_export(path)()
        self.engine.weights.prepare(
            PrepareRequest(
                **export.model_dump(include=set(PrepareRequest.model_fields))
            )
        )
        self.engine.commit(CommitRequest(version=version, digest=export.digest)).result(
            timeout=600
        )
        Path(export.path).unlink()

    def steps(self) -> list[Batch]:
        """Run the loop to its end; writes metrics.jsonl as it goes."""
        config, done = self.config, []
        started = time.monotonic()
        with (self.run_dir / "metrics.jsonl").open("w", encoding="utf-8") as file:
            loop = sync_reference(
                self.parts(),
                num_groups=config.trainer.num_groups,
                group_size=config.rollout.group_size,
                num_steps=config.trainer.num_steps,
                part_tokens=self.part_tokens,
            )
            for batch, report in loop:
                line = {
                    "step": batch.version + 1,
                    "time_s": time.monotonic() - started,
                    **batch_metrics(batch, self.special_tokens),
                    **report.metrics,
                }
                file.write(json.dumps(line) + "\n")
                file.flush()
                done.append(batch)
        self.trainer.save(self.run_dir / "final")
        return done

    def close(self) -> None:
        """End the engine and remove the staging folder."""
        self.engine.stop()
        self._staging.cleanup()


def main() -> None:
    """Run one config."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--run-dir", type=Path, required=True)
    arguments = parser.parse_args()
    run = SyncRun(load_config(arguments.config, arguments.overrides), arguments.run_dir)
    try:
        steps = run.steps()
    finally:
        run.close()
    reward = batch_metrics(steps[-1], run.special_tokens)["reward/mean"]
    print(f"{len(steps)} steps, last reward/mean {reward:.3f}, in {arguments.run_dir}")


if __name__ == "__main__":
    main()
