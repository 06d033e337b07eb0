"""Environments of https://github.com/PrimeIntellect-ai/verifiers."""

from asyncrl.base.extensions import Extension, HarnessKind

EXTENSION = Extension(
    about="Environments of the verifiers package.",
    page="docs/verifiers.md",
    extra="verifiers",
    fields={
        "generator": "asyncrl.extensions.verifiers.settings:FIELDS",
        "task": "asyncrl.extensions.verifiers.settings:FIELDS_OF_TASK",
    },
    harnesses={
        "verifiers": HarnessKind(
            "asyncrl.extensions.verifiers.verifiers_harness:VerifiersHarness",
            "ID",
            "a verifiers environment",
            task_source="verifiers",
        )
    },
    task_sources={
        "verifiers": "asyncrl.extensions.verifiers.verifiers_tasks:find_tasks"
    },
    refusals={
        "": "asyncrl.extensions.verifiers.verifiers_rules:refuse_half",
        "task": "asyncrl.extensions.verifiers.verifiers_rules:refuse_unread",
    },
)
