"""Import what the processes of a run import, so that Python writes the bytecode of all
of it.
"""

import importlib

from asyncrl.launch.fork_server import PRELOADED

CONTROLLER = (
    "asyncrl.cli",
    "asyncrl.job.loop",
    "asyncrl.job.serve",
    "asyncrl.agents.worker",
)
LATER = (
    "asyncrl.observe.report_page",
    "matplotlib.figure",
    "tensorboard.summary.writer.event_file_writer",
)

for module in (
    *CONTROLLER,
    *PRELOADED,
    *LATER,
    "transformers.models.qwen3.modeling_qwen3",
):
    importlib.import_module(module)
