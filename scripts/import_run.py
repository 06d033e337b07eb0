"""Import what the processes of a run import, so that Python writes the bytecode of all
of it. Prints a line before each import, because without bytecode an import takes long.
"""

import importlib

from asyncrl.launch.fork_server import PRELOADED

FIRST = ("torch", "transformers", "datasets")
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
MODEL = "transformers.models.qwen3.modeling_qwen3"
MODULES = (*FIRST, *CONTROLLER, *PRELOADED, *LATER, MODEL)

for place, module in enumerate(MODULES, start=1):
    print(
        f"compiling what a run imports: {place} of {len(MODULES)}, {module}", flush=True
    )
    importlib.import_module(module)
