"""Weights & Biases, by its own client (extra wandb)."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.operation import WandbArgs
from asyncrl.observe.samples import ShownRollout
from asyncrl.observe.trackers.tracker import SAMPLE_COLUMNS, TrackedRun, sample_rows

REACH_S = 10.0
"""Seconds in which the server has to give any answer; else what is told stays in RUN_DIR/wandb."""


class Wandb:
    """Metrics over `step`, which is a metric as the client has it: evaluations come late, over their
    policy_version. The run's id is that in run.id, so a resumed run goes on in the same one.
    """

    def __init__(self, args: WandbArgs) -> None:
        self._args = args
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """Without a key or a server the run is shown later: by `wandb sync`."""
        import wandb

        args, settings = self._args, wandb.setup().settings
        mode = settings.mode if args.mode == "auto" else args.mode
        if mode == "online" and (why := _why_offline(str(settings.base_url))):
            run.warn(f"{why}; all is kept, and `wandb sync {run.run_dir}/wandb/offline-run-*` sends it")
            mode = "offline"
        self._run = wandb.init(
            **(args.model_dump(include={"project", "entity", "group", "tags"})),
            id=run.run_id,
            name=run.name,
            config=dict(run.config),
            dir=str(run.run_dir),
            mode=mode,
            resume="allow" if mode == "online" else None,
            allow_val_change=True,
            settings=wandb.Settings(quiet=True, console="off", reinit="create_new"),
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="policy_version")
        return f"{args.entity or ''}/{args.project}/{run.run_id}"

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of its history."""
        self._run.log({"step": step, **metrics})

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """One line, over policy_version."""
        self._run.log({"policy_version": version, **metrics})

    def samples(self, step: int, samples: Sequence[ShownRollout]) -> None:
        """A table a step."""
        from wandb import Table

        table = Table(columns=list(SAMPLE_COLUMNS), data=sample_rows(samples), allow_mixed_types=True)
        self._run.log({"step": step, "samples": table})

    def weights(self, version: int, digest: str) -> None:
        """Not shown."""

    def picture(self, name: str, path: Path) -> None:
        """An image."""
        from wandb import Image

        self._run.log({name: Image(str(path))})

    def close(self, state: str) -> None:
        """Send the rest; blocks until it is sent."""
        self._run.finish(exit_code=0 if state == "done" else 1)


def _why_offline(base_url: str) -> str:
    """What the client would wait for: a key on the terminal, or a server for a minute and a half. '' if there
    are both.
    """
    import wandb

    try:
        urllib.request.urlopen(base_url, timeout=REACH_S).close()
    except urllib.error.HTTPError:  # an answer
        pass
    except OSError as error:
        if not isinstance(
            getattr(error, "reason", None), ssl.SSLError
        ):  # the client may know the certificate
            return f"{base_url} cannot be reached ({error})"
    is_known = wandb.login(prompt=False, verify=False)
    return "" if is_known else f"there is no key for {base_url} (`wandb login`, or WANDB_API_KEY)"
