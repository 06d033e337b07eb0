"""Which published versions are evaluated. Pure: knows version numbers, no engine and no clock."""

from __future__ import annotations


class Schedule:
    """The first published version at or after each multiple of `every`, and the last version.

    Life:       is_due_nowait(v) is asked once for each published version, in order. Versions that a push skipped over
                cost nothing: what comes next stands for them, once.
    """

    def __init__(self, *, every: int, last: int, at_start: bool, evaluated: int | None = None) -> None:
        """`evaluated`: the newest version that was evaluated before the run was resumed."""
        self.every, self.last, self.at_start = every, last, at_start and evaluated is None
        self.is_over = evaluated is not None and evaluated >= last
        """The last version was evaluated before."""
        self._next = every if evaluated is None else (evaluated // every + 1) * every

    def __repr__(self) -> str:
        return f"<Schedule every {self.every}, next at {min(self._next, self.last)}, last at {self.last}>"

    def is_due_nowait(self, version: int) -> bool:
        """Whether `version` is to be evaluated; the next one is due at the following multiple then."""
        if not self.is_next(version):
            return False
        self._next = (version // self.every + 1) * self.every
        return True

    def is_next(self, version: int) -> bool:
        """What is_due_nowait would say of this version; nothing changes."""
        return not self.is_over and version >= min(self._next, self.last)
