"""Loss and gradient of demonstrations against TRL's SFTTrainer on the same rows and
weights, packed and unpacked.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import MOE, make_tiny_moe
from trainer_cases import MakeStep, assert_all_close, gradient_of

from asyncrl.config.engineless_config import MEAN_NLL
from asyncrl.extensions.sft.demonstrations import DemonstrationFeed, demonstration_of
from asyncrl.messages.records import Batch
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.trainer_client import pack_groups

pytestmark = [
    pytest.mark.xdist_group("trl"),  # its import costs seconds: one process
    pytest.mark.extension("sft"),
]
MARKED = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


COMPLETIONS = [
    {"prompt": [said("user", "a" * n)], "completion": [said("assistant", "xyz" * m)]}
    for n, m in ((1, 9), (7, 1), (3, 4), (12, 2), (2, 2))
]
CHATS = [
    {
        "messages": [
            said("user", "ab"),
            said("assistant", "c" * number),
            said("user", "de"),
            said("assistant", "fgh"),
        ]
    }
    for number in (1, 5, 12)
]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|user|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)
"""TRL also learns the line end behind an answer, which no engine samples."""
CASES = {
    "completions": (COMPLETIONS, None, {}),
    "ChatML": (COMPLETIONS, CHATML, {}),
    "every answer": (CHATS, MARKED, {"assistant_only_loss": True}),
}


def theirs(
    model_dir: Path, folder: Path, case: str, *, is_packed: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of TRL's trainer for all rows at once."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows, template, options = CASES[case]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if template is not None:
        tokenizer.chat_template = template
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 1 if is_packed else len(rows),
        "packing": is_packed,
        "max_length": 512,
    }
    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        disable_tqdm=True,
        **settings,
        **options,
    )
    made = SFTTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    (inputs,) = [*made.get_train_dataloader()]
    if case == "ChatML":
        labels = inputs["labels"]
        ends = inputs["input_ids"] == tokenizer.convert_tokens_to_ids("\n")
        is_last = ends & (labels != -100)
        assert int(is_last.sum()) == len(rows)
        labels[is_last] = -100
    loss = made.compute_loss(made.model, dict(inputs))
    loss.backward()
    gradients = {
        name: weight.grad
        for name, weight in made.model.named_parameters()
        if weight.grad is not None
    }
    return float(loss), gradients


def ours_of(model_dir: Path, folder: Path, case: str) -> Batch:
    rows, template, _ = CASES[case]
    path = None
    if template is not None:
        path = folder / "template.jinja"
        path.write_text(template)
    tokenizer = HFChatTokenizer(model_dir, chat_template=path)
    tokens = tuple(demonstration_of(row, "row", tokenizer) for row in rows)
    return DemonstrationFeed(tokens, per_step=len(rows), seed=0).batch(0)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_match_trl(
    case: str,
    is_packed: bool,
    make_step: MakeStep,
    tiny_model_dir: Path,
    tmp_path: Path,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TRL, about attention without flash
        loss, gradients = theirs(tiny_model_dir, tmp_path, case, is_packed=is_packed)
    # A micro-batch of 1 token holds one row, a large one packs all rows.
    rank = make_step(
        dtype="float32",
        trainer={"micro_batch_tokens": 16384 if is_packed else 1},
        algorithm=MEAN_NLL.model_dump(),
        measures_gap=False,
    )
    header, tokens = pack_groups(ours_of(tiny_model_dir, tmp_path, case))
    measured = rank.evaluate(header, tokens)
    sums = gradient_of(rank, header, tokens)
    assert sums.loss == pytest.approx(loss, rel=1e-6)
    assert measured["eval/loss"] == pytest.approx(loss, rel=1e-6)
    assert measured["eval/tokens"] == len(sums.logprobs_M)
    named = rank.masters.named
    assert named.keys() == gradients.keys()
    found = [named[name].grad for name in gradients]
    assert_all_close(found, gradients.values(), 1e-6)  # type: ignore[arg-type]


def test_router_loss_matches_trl(make_step: MakeStep, tmp_path: Path) -> None:
    """TRL adds the load-balancing loss by the weight in the model's config."""
    folder = make_tiny_moe(tmp_path / "moe", **MOE | {"router_aux_loss_coef": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, gradients = theirs(folder, tmp_path, "completions", is_packed=False)
    rank = make_step(folder, algorithm=MEAN_NLL.model_dump(), measures_gap=False)
    batch = pack_groups(ours_of(folder, tmp_path, "completions"))
    nll = rank.evaluate(*batch)["eval/loss"]
    sums = gradient_of(rank, *batch)
    assert sums.loss == pytest.approx(loss, rel=1e-6)
    found = [rank.masters.named[name].grad for name in gradients]
    assert_all_close(found, gradients.values(), 1e-6)  # type: ignore[arg-type]
    balance = sums.stats["router_aux_loss"] / len(sums.logprobs_M)
    assert nll + 0.5 * balance == pytest.approx(loss, rel=1e-6)
