"""What tests of placement share: the quickstart with some settings, placed on a machine with so many CUDA
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.config import RunConfig, load_config
from asyncrl.errors import ConfigError
from asyncrl.placement.devices import Placement, place

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
EVAL = "eval={task: {python: 'asyncrl.tasks.letters:Letters'}}"


class Cases:
    """The quickstart, with `always` among its settings."""

    def __init__(self, always: Sequence[str]) -> None:
        self.always = always

    def load(self, *overrides: str) -> RunConfig:
        return load_config(QUICKSTART, [*self.always, *overrides])

    def placed(self, num_cuda: int, *overrides: str) -> Placement:
        return place(self.load(*overrides), num_cuda)

    def refusal(self, num_cuda: int, *overrides: str) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            self.placed(num_cuda, *overrides)
        return caught.value
