"""Supervised fine-tuning: `asyncrl sft`."""

from asyncrl.base.extensions import Extension

EXTENSION = Extension(
    about="Supervised fine-tuning on demonstrations.",
    page="docs/sft.md",
    jobs={"data": "asyncrl.extensions.sft.sft_config:SftConfig"},
)
