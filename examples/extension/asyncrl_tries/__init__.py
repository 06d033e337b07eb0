"""An extension of asyncrl from elsewhere: rollouts of several tries."""

from asyncrl.base.extensions import Extension, HarnessKind

EXTENSION = Extension(
    about="Rollouts of several tries.",
    fields={"generator": "asyncrl_tries.settings:FIELDS"},
    harnesses={
        "tries": HarnessKind(
            "asyncrl_tries.harness:TriesHarness", "N", "N tries", parse=int
        )
    },
    check="asyncrl_tries.harness:check_limits",
)
