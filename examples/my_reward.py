"""A reward function of your own: `task: {files: [examples/data/capitals.jsonl], reward:
examples.my_reward:names_it}`.
"""

from asyncrl.messages.records import Prompt


def names_it(prompt: Prompt, completion: str, answer: str) -> float:
    """1 if the answer is named, half of it taken off if it drowns in more than 20
    words.
    """
    if answer.lower() not in completion.lower():
        return 0.0
    return 1.0 if len(completion.split()) <= 20 else 0.5
