"""OpenEnv servers as environments of a run."""

from asyncrl.base.extensions import Extension, HarnessKind

EXTENSION = Extension(
    about="Episodes of OpenEnv servers.",
    page="docs/openenv.md",
    extra="openenv",
    fields={"generator": "asyncrl.extensions.openenv.settings:FIELDS"},
    harnesses={
        "openenv": HarnessKind(
            "asyncrl.extensions.openenv.openenv_harness:OpenEnvHarness",
            "URL",
            "an OpenEnv environment",
        )
    },
    check="asyncrl.extensions.openenv.openenv_harness:check_servers",
)
