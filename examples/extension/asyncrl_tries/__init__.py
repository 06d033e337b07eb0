"""An extension of asyncrl from elsewhere: rollouts of several tries, a tracker, and an
engine kind.
"""

from asyncrl.base.extensions import AddedEngine, Extension, HarnessKind

EXTENSION = Extension(
    about="Rollouts of several tries.",
    fields={
        "generator": "asyncrl_tries.settings:FIELDS",
        "rollout": "asyncrl_tries.settings:OF_ENGINES",
    },
    harnesses={
        "tries": HarnessKind(
            "asyncrl_tries.harness:TriesHarness", "N", "N tries", parse=int
        )
    },
    trackers={"csv": "asyncrl_tries.csv_tracker:CsvTracker"},
    engines={
        "fixed": AddedEngine(
            "asyncrl_tries.settings:FACTS",
            "asyncrl_tries.engine:MAKER",
            preload="asyncrl_tries.server",
        )
    },
    check="asyncrl_tries.harness:check_limits",
)
