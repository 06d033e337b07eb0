"""litellm, as most harnesses use it: whole messages go back as it made them."""

import json
from functools import partial

import litellm
from framework_tasks import PARIS, City, chat_loop


def ask(model="openai/policy", **given):
    return litellm.completion(model=model, **given).choices[0].message


def tools():
    return chat_loop(ask)


def overflow_of(model):
    try:
        return chat_loop(partial(ask, model=model), is_long=True)
    except litellm.ContextWindowExceededError as error:
        return [type(error).__name__]


def overflow():
    return overflow_of("openai/policy")


def anthropic_overflow():
    return overflow_of("anthropic/policy")


def parse():
    return json.loads(ask(messages=PARIS, response_format=City).content)
