"""`python -m asyncrl_servers.scoring.reward_model --spec FILE --fd N`: scores of a sequence
classification model.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
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
from asyncrl.weights.aside import Aside

KEY = "task.reward.model"
T = TypeVar("T")


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
        self._text_config = model.config.get_text_config()
        self._pad_id: int | None = self._text_config.pad_token_id
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
        """Return what the tokenizer makes of a text, input_ids and perhaps
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
        found = {
            name: list(values)
            for name, values in encoded.items()
            if name != "attention_mask"
        }
        if not 0 < (num := len(found["input_ids"])) <= self._max_length:
            raise Refused(
                400,
                f"the text has {num} tokens of the reward model, which reads 1 to {self._max_length}",
                rule="a cut text would get the score of another one",
                way_out="lower rollout.max_tokens, or use a reward model with a larger context.",
            )
        return found

    @torch.inference_mode()
    def scores(self, texts: Sequence[Mapping[str, list[int]]]) -> list[float]:
        """Return a score for each text, as transformers computes for it alone."""
        length = max(len(text["input_ids"]) for text in texts)
        pad_id = self._pad_id
        if pad_id is None:
            # A decoder's head reads the last token that is not padding. An id of no
            # text is padding for sure; the model's own end of turn would not be.
            used = {number for text in texts for number in text["input_ids"]}
            known = range(self._text_config.vocab_size)
            free = (number for number in known if number not in used)
            pad_id = next(free, None)
            # The texts use a whole small vocabulary: none is padded.
            if pad_id is None and len(texts) > 1:
                return [self.scores([text])[0] for text in texts]
            self._text_config.pad_token_id = pad_id
            pad_id = pad_id or 0  # a lone text is not padded
        rows = {
            name: [
                text[name]
                + [pad_id if name == "input_ids" else 0] * (length - len(text[name]))
                for text in texts
            ]
            for name in texts[0]
        }
        rows["attention_mask"] = [
            [int(place < len(text["input_ids"])) for place in range(length)]
            for text in texts
        ]
        given = {
            name: torch.tensor(values, device=self._device)
            for name, values in rows.items()
        }
        logits_BL: Tensor = self._model(**given).logits
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


Waiting = tuple[Mapping[str, list[int]], "asyncio.Future[float]"]


class Batches:
    """Score texts in batches of similar length.

    Waits: a call waits until the batches before it are done, then for its own. A model
        that sleeps keeps the lock: calls wait until it wakes.
    """

    def __init__(self, model: RewardModel, spec: RewardSpec) -> None:
        self._model = model
        # A CPU's kernels round by the shape of the batch, and batches follow from timing.
        # One text a batch gives the same bits in every run.
        self._batch_tokens = 1 if spec.device == "cpu" else spec.batch_tokens
        self._waiting: list[Waiting] = []
        self._lock = asyncio.Lock()
        self._moving = asyncio.Lock()
        # OpenMP counts threads per calling thread.
        self._thread = ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(spec.threads,)
        )

    async def score(self, text: Mapping[str, list[int]]) -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, future))
        async with self._lock:
            # The first holder of the lock scores the texts of all calls behind it.
            if not future.done():
                await self._run()
        return await future

    async def sleep(self) -> TransferStats:
        """Free the model's memory after the batches that have come. Idempotent. Raises
        Refused (507).
        """
        async with self._moving:
            if self._model.is_asleep:
                return TransferStats(num_bytes=0, seconds=0.0)
            await self._lock.acquire()
            try:
                return await self._in_thread(self._model.sleep)
            finally:
                if not self._model.is_asleep:
                    self._lock.release()

    async def wake(self) -> TransferStats:
        """Bring the weights back, then answer calls. Idempotent. Raises Refused (507)."""
        async with self._moving:
            if not self._model.is_asleep:
                return TransferStats(num_bytes=0, seconds=0.0)
            moved = await self._in_thread(self._model.wake)
            self._lock.release()
            return moved

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _run(self) -> None:
        taken, self._waiting = self._waiting, []
        for batch in cut_batches(taken, self._batch_tokens):
            texts = [text for text, _ in batch]
            try:
                scores = await self._in_thread(partial(self._model.scores, texts))
            # Each call of this batch answers with it.
            except Exception as error:
                for _, future in batch:
                    future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                future.set_result(score)


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
        return await batches.sleep()

    async def wake(body: WakeRequest) -> TransferStats:
        return await batches.wake()

    app = make_app(secret_of(SECRET_ENV))
    add_route(app, "GET", "/health", health)
    add_route(app, "POST", "/reward", reward)
    add_route(app, "POST", "/sleep", sleep)
    add_route(app, "POST", "/wake", wake)
    serve(app, fd)


if __name__ == "__main__":
    main()
