"""An extension of asyncrl: the engine kind `simulated`, a latency model without weights,
and the launcher `sleeping`, whose trainers sleep instead of computing.
"""

from asyncrl.base.extensions import AddedEngine, Extension

EXTENSION = Extension(
    about="A simulated engine and a trainer that sleeps, for load tests.",
    page="docs/engines.md",
    fields={"rollout": "asyncrl_simulated.latency_model:FIELDS"},
    engines={
        "simulated": AddedEngine(
            "asyncrl_simulated.latency_model:FACTS",
            "asyncrl_simulated.simulated_maker:MAKER",
            preload="asyncrl_simulated.simulated_engine",
        )
    },
    launchers={"sleeping": "asyncrl_simulated.sleeping_trainer:SleepingLauncher"},
    check="asyncrl_simulated.simulated_maker:check_engine",
)
