"""Check a config of `asyncrl sft`: read its rows, and load everything except weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from asyncrl.extensions.sft.demonstrations import read_demonstrations
from asyncrl.extensions.sft.sft_config import SftConfig
from asyncrl.job.check.config_check import check_model, check_plan
from asyncrl.job.check.config_warnings import find_warnings
from asyncrl.job.check.model_check import positions_of
from asyncrl.launch.machine import Node
from asyncrl.launch.plan import resolve_auto


def check_sft(config: SftConfig, nodes: Sequence[Node]) -> Iterator[str]:
    run, resolved = resolve_auto(config.as_run(), nodes)
    lines, tokenizer = check_model(run, nodes)
    yield from (*lines, *resolved)
    if tokenizer is not None:
        positions = positions_of(config.model)
        keys: list[Literal["files", "eval_files"]] = ["files"]
        if config.data.eval_files is not None:
            keys.append("eval_files")
        longest = 1
        digests = dict[str, str]()
        num_rows = None
        for key in keys:
            rows = read_demonstrations(config.data, tokenizer, positions, key)
            digests[f"data.{key}"] = rows.digest
            num_rows = num_rows or len(rows.rows)
            longest = max(longest, rows.longest)
            yield f"data.{key}: {rows.summary}"
            yield from (f"warning: {text}" for text in rows.warnings(tokenizer))
        trained = {digests.pop("data.files")}
        num_steps = config.data.epochs * (num_rows or 1) // config.trainer.num_groups
        known = {"num_steps": config.trainer.num_steps or num_steps}
        trainer = config.trainer.model_copy(update=known)
        doubts = find_warnings(trainer, num_rows, trained, digests)
        yield from (f"warning: {text}" for text in doubts)
        # A row longer than trainer.micro_batch_tokens is a pass of its own: the memory
        # plan counts it.
        run, _ = resolve_auto(config.as_run(max_tokens=longest), nodes)
    yield from check_plan(run, nodes)
