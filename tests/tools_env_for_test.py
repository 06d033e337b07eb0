"""A verifiers environment with a tool server (MCP) that all its tasks share, for the library's own program
`null`.
"""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["ToolsTaskset"]


class WordTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "words"

    @vf.tool
    def backwards(self, word: str) -> str:
        """The word, read backwards."""
        return word[::-1]


class ToolsData(vf.TaskData):
    answer: str


class ToolsTask(vf.Task[ToolsData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class ToolsTaskset(vf.Taskset[ToolsTask, vf.TasksetConfig]):
    def load(self) -> list[ToolsTask]:
        return [
            ToolsTask(ToolsData(prompt=f"Write {word} backwards.", answer=word[::-1]), self.config.task)
            for word in ("abc", "stressed")
        ]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [WordTools(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    WordTools.run()
