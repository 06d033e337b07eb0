"""litellm, as most harnesses use it: whole messages go back as it made them."""

import json

import litellm
from framework_tasks import PARIS, City, chat_loop


def ask(**given):
    return litellm.completion(model="openai/policy", **given).choices[0].message


def tools():
    return chat_loop(ask)


def parse():
    return json.loads(ask(messages=PARIS, response_format=City).content)
