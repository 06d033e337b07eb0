"""mini-swe-agent with its own prompts."""

import tempfile
from pathlib import Path

import minisweagent
import yaml
from litellm import ContextWindowExceededError
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def tools():
    config = yaml.safe_load(
        (Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text()
    )
    settings = {
        key: value
        for key, value in config["model"].items()
        if key not in ("model_class", "model_kwargs")
    }
    limits = {
        key: config["agent"][key]
        for key in ("system_template", "instance_template", "step_limit")
    }
    with tempfile.TemporaryDirectory() as folder:
        model = LitellmModel(
            model_name="openai/policy", cost_tracking="ignore_errors", **settings
        )
        agent = DefaultAgent(model, LocalEnvironment(cwd=folder), **limits)
        (Path(folder) / "a.txt").write_text("alpha\n")
        (Path(folder) / "b.txt").write_text("beta\n")
        ended = agent.run("Join a.txt and b.txt into c.txt.")
        return [ended["exit_status"], (Path(folder) / "c.txt").read_text()]


def overflow():
    try:
        return tools()
    except ContextWindowExceededError as error:
        return [type(error).__name__]
