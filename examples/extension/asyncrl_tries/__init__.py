"""An extension of asyncrl from elsewhere: rollouts of several tries, and an engine kind."""

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
    engines={
        "fixed": AddedEngine(
            "asyncrl_tries.settings:FACTS",
            "asyncrl_tries.engine:MAKER",
            preload="asyncrl_tries.server",
        )
    },
    check="asyncrl_tries.harness:check_limits",
)
