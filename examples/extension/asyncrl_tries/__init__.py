"""An extension of asyncrl from elsewhere: rollouts of several tries, and a tracker."""

from asyncrl.base.extensions import Extension, HarnessKind

EXTENSION = Extension(
    about="Rollouts of several tries.",
    fields={"generator": "asyncrl_tries.settings:FIELDS"},
    harnesses={
        "tries": HarnessKind(
            "asyncrl_tries.harness:TriesHarness", "N", "N tries", parse=int
        )
    },
    trackers={"csv": "asyncrl_tries.csv_tracker:CsvTracker"},
    check="asyncrl_tries.harness:check_limits",
)
