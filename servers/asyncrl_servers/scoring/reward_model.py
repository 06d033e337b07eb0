"""`python -m asyncrl_servers.scoring.reward_model --spec FILE --fd N`: scores of a sequence
classification model.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from asyncrl.base.errors import Message
from asyncrl.base.http import (
    SECRET_ENV,
    Refused,
    add_route,
    child_arguments,
    die_with_parent,
    fail,
    make_app,
    secret_of,
    serve,
)
from asyncrl.extensions.scoring.scoring_api import RewardRequest, RewardResponse
from asyncrl.messages.engine_api import EngineHealth, TransferStats, WakeRequest
from asyncrl.models.devices import own_memory
from asyncrl.weights.aside import Aside

KEY = "task.reward.model"


class RewardSpec(Message):
    name: str
    model_path: str
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    threads: int
    reads: Literal["chat", "pair", "completion"]
    label: int
    batch_tokens: int
    """Tokens of a forward pass, padding included."""
    aside_dir: Path = Path()
    """Folder for a file with what leaves a CPU while it sleeps."""


class RewardModel:
    """The model and its tokenizer, used by one thread at a time."""

    def __init__(self, spec: RewardSpec) -> None:
        """Load the model; exit if it cannot score these texts."""
        self._spec = spec
        self._device = torch.device(spec.device)
        try:
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                spec.model_path
            )
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                spec.model_path,
                dtype=getattr(torch, spec.dtype),
                output_loading_info=True,
            )
        except Exception as error:
            fail(
                f"cannot load the reward model in {spec.model_path}: {error}",
                way_out=f"check {KEY}.path, and that transformers knows the model type.",
            )
        # transformers draws missing weights at random, and only warns.
        if missing := sorted(loading["missing_keys"]):
            fail(
                f"{spec.model_path} has no weights {', '.join(missing[:3])}",
                rule="the reward is the logit of a trained head",
                way_out=f"set {KEY}.path to a sequence classification model.",
            )
        if spec.reads == "chat" and not self.tokenizer.chat_template:
            fail(
                f"{spec.model_path} has no chat template",
                way_out=f"set {KEY}.reads=pair or {KEY}.reads=completion.",
            )
        self._model: PreTrainedModel = model.to(self._device).eval()
        self._model.requires_grad_(False)
        own_memory(self._model)
        self._pad_id: int | None = model.config.get_text_config().pad_token_id
        # A CPU's kernels round by the shape of the batch, and batches follow from timing.
        # One text a batch gives the same bits in every run. Without a padding id a
        # decoder's head does not find the last token of a padded text.
        is_alone = spec.device == "cpu" or self._pad_id is None
        self.batch_tokens = 1 if is_alone else spec.batch_tokens
        self._max_length = _max_length(self.tokenizer, model)
        self._aside = Aside(self._device, spec.aside_dir)

    @property
    def is_asleep(self) -> bool:
        return self._aside.is_away

    def sleep(self) -> TransferStats:
        """Free the weights' memory. Raises Refused (507)."""
        tensors = itertools.chain(self._model.parameters(), self._model.buffers())
        return self._aside.send_away(tensors)

    def wake(self) -> TransferStats:
        """Bring the weights back. Raises Refused (507)."""
        return self._aside.bring_back()

    def ids_of(self, request: RewardRequest) -> dict[str, list[int]]:
        """Return what the tokenizer makes of a text: input_ids, attention_mask and perhaps
        token_type_ids. Raises Refused (400).
        """
        if self._spec.reads == "chat":
            answer = {"role": "assistant", "content": request.completion}
            try:
                encoded = self.tokenizer.apply_chat_template(
                    [*request.messages, answer], return_dict=True
                )
            # jinja's, and those that templates raise
            except Exception as error:
                raise Refused(
                    400, f"the reward model's template refuses the chat: {error}"
                ) from error
        elif self._spec.reads == "pair":
            encoded = self.tokenizer(request.question, request.completion)
        else:
            encoded = self.tokenizer(request.completion)
        found = {name: list(values) for name, values in encoded.items()}
        if not 0 < (num := len(found["input_ids"])) <= self._max_length:
            raise Refused(
                400,
                f"the text has {num} tokens of the reward model, which reads 1 to {self._max_length}",
                rule="a cut text would get the score of another one",
                way_out="lower rollout.max_tokens, or use a reward model with a larger context.",
            )
        return found | {"attention_mask": [1] * num}

    @torch.inference_mode()
    def scores(self, texts: Sequence[Mapping[str, list[int]]]) -> list[float]:
        """Return a score for each text, as transformers computes for it alone."""
        rows = {
            name: pad_sequence(
                [torch.tensor(text[name]) for text in texts],
                batch_first=True,
                padding_value=self._pad_id or 0 if name == "input_ids" else 0,
            ).to(self._device)
            for name in texts[0]
        }
        logits_BL: Tensor = self._model(**rows).logits
        return logits_BL[:, self._spec.label].float().tolist()


def _max_length(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> int:
    """Return the largest number of tokens that tokenizer and model allow."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    for name, module in model.named_modules():
        # RoBERTa's positions begin after the padding's.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            limit = min(limit, module.num_embeddings - offset)
    return int(min(tokenizer.model_max_length, limit))


Waiting = tuple[Mapping[str, list[int]], Future[float]]


class Batches:
    """Score texts in batches of similar length, in one thread.

    Waits: a call waits until the batches before it are done, then for its own. No call
        comes to a model that sleeps (RoleClient).
    """

    def __init__(self, model: RewardModel, spec: RewardSpec) -> None:
        self._model = model
        self._waiting = SimpleQueue[Waiting]()
        # OpenMP counts threads per calling thread.
        self._thread = ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(spec.threads,)
        )

    async def score(self, text: Mapping[str, list[int]]) -> float:
        answer: Future[float] = Future()
        # A caller that leaves cannot cancel a running future, so set_result() never
        # raises.
        answer.set_running_or_notify_cancel()
        self._waiting.put((text, answer))
        # One run scores the texts of all calls that have come; the runs of these calls
        # find nothing.
        self._thread.submit(self._run)
        return await asyncio.wrap_future(answer)

    async def move(self, move: Callable[[], TransferStats]) -> TransferStats:
        """Sleep or wake, after the batches that have come. Raises Refused (507)."""
        return await asyncio.wrap_future(self._thread.submit(move))

    def _run(self) -> None:
        taken = [self._waiting.get() for _ in range(self._waiting.qsize())]
        for batch in cut_batches(taken, self._model.batch_tokens):
            try:
                scores = self._model.scores([text for text, _ in batch])
            # Each call of this batch answers with it.
            except Exception as error:
                for _, answer in batch:
                    answer.set_exception(error)
                continue
            for (_, answer), score in zip(batch, scores, strict=True):
                answer.set_result(score)


def cut_batches(taken: list[Waiting], batch_tokens: int) -> Iterator[list[Waiting]]:
    """Yield batches of at most `batch_tokens` with padding, longest texts first, or one
    text.
    """
    batch: list[Waiting] = []
    longest = 0
    for each in sorted(taken, key=lambda each: -len(each[0]["input_ids"])):
        if batch and longest * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        if not batch:
            longest = len(each[0]["input_ids"])
        batch.append(each)
    if batch:
        yield batch


def main() -> None:
    die_with_parent()
    text, fd = child_arguments()
    spec = RewardSpec.model_validate_json(text)
    torch.set_num_threads(spec.threads)
    model = RewardModel(spec)
    batches = Batches(model, spec)

    async def reward(body: RewardRequest) -> RewardResponse:
        text = model.ids_of(body)
        score = await batches.score(text)
        if not math.isfinite(score):
            raise Refused(400, f"the reward model's logit is {score}")
        return RewardResponse(score=score, num_tokens=len(text["input_ids"]))

    async def health() -> EngineHealth:
        return EngineHealth(
            policy_version=0,
            num_running=0,
            num_queued=0,
            tokens_generated=0,
            asleep=["weights"] if model.is_asleep else [],
        )

    async def sleep() -> TransferStats:
        return await batches.move(model.sleep)

    async def wake(body: WakeRequest) -> TransferStats:
        return await batches.move(model.wake)

    app = make_app(secret_of(SECRET_ENV))
    add_route(app, "GET", "/health", health)
    add_route(app, "POST", "/reward", reward)
    add_route(app, "POST", "/sleep", sleep)
    add_route(app, "POST", "/wake", wake)
    serve(app, fd)


if __name__ == "__main__":
    main()
