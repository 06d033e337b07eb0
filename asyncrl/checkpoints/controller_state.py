"""What a checkpoint says of the run beside the trainer's state: enough to go on without the journal.

It is read only where the journal is gone: a resume that has the journal knows more, and takes it from there.
Parts.controller_state and Parts.put_back (run/build.py) write and read it. A new field needs a default, or
checkpoints from before cannot be read.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ControllerState(BaseModel, frozen=True):
    """Written as controller.json. `feed`: Feed.state(). `out`: prompts that were drawn and are in no
    batch yet, by id, with how often they were handed back.
    """

    feed: dict[str, Any]
    out: dict[str, int]
    next_group_id: int
