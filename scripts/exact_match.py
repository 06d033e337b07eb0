"""Print how often a trained model answers held-out prompts exactly.

    python scripts/exact_match.py RUN_DIR              # exact match: 97 of 100 held-out prompts, 25 different
    python scripts/exact_match.py RUN_DIR --show 5     # also prints five answers
    python scripts/exact_match.py RUN_DIR --min 0.8    # exits with 1 below this rate
    python scripts/exact_match.py RUN_DIR --sampled    # answers are sampled at temperature 1

The model in RUN_DIR/final answers greedily, or samples. An answer matches if it is the
right text, special tokens included, and then the end-of-turn token. The run's task must
accept `held_out: true` in task.args, like asyncrl.tasks.toy:Letters.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from asyncrl.config import load_config
from asyncrl.tasks.sources import build_task

NUM_PROMPTS = 100
EXAM_SEED = 1_000_000


def answers_of(
    model_path: Path, prompts: list[str], max_tokens: int, *, is_sampled: bool = False
) -> tuple[list[str], str]:
    """Return the answers with their special tokens, and the text of the end-of-turn
    token.

    They are greedy, or sampled at temperature 1.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_path)
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
    )
    output = model.generate(
        **inputs, max_new_tokens=max_tokens, do_sample=is_sampled, top_k=0
    )
    texts = tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False
    )
    end: str = tokenizer.eos_token
    # generate() pads the answers that end before the longest one
    return [
        text.partition(end)[0] + end if end in text else text for text in texts
    ], end


def main() -> int:
    """Print the rate; return 1 if it is below --min."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--show", type=int, default=0, help="answers to print")
    parser.add_argument(
        "--sampled", action="store_true", help="sample at temperature 1"
    )
    parser.add_argument(
        "--min", type=float, default=0.0, help="smallest rate that is not a failure"
    )
    arguments = parser.parse_args()
    config = load_config(arguments.run_dir / "config.yaml")
    settings = config.tasks[""]
    task = build_task(
        settings.model_copy(update={"args": {**settings.args, "held_out": True}}),
        EXAM_SEED,
    )
    items: list[Any] = [task.prompt(index) for index in range(NUM_PROMPTS)]
    prompts = [item.content for item in items]
    model_path = arguments.run_dir / "final"
    found, end = answers_of(
        model_path, prompts, config.rollout.max_tokens, is_sampled=arguments.sampled
    )
    is_right = [
        answer == item.answer + end for answer, item in zip(found, items, strict=True)
    ]
    for prompt, answer, right in list(zip(prompts, found, is_right, strict=True))[
        : arguments.show
    ]:
        print(f"{prompt!r} -> {answer!r}{'' if right else '   wrong'}")
    print(
        f"exact match: {sum(is_right)} of {NUM_PROMPTS} held-out prompts, {len(set(prompts))} different"
    )
    return int(sum(is_right) < arguments.min * NUM_PROMPTS)


if __name__ == "__main__":
    sys.exit(main())
