"""Grammar constraints on logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncrl.base.http import Refused
from asyncrl.messages.engine_api import GenerateRequest
from asyncrl.messages.token_grammars import GrammarError, TokenGrammars, TokenMatcher
from asyncrl_servers.embedded.decoder import LoadedModel, to_device
from asyncrl_servers.embedded.sequence import Sequence


class Constraints:
    """Grammars of an engine.

    Invariant: a matcher consumes each sampled token once, in begin() or advance().
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._grammars: TokenGrammars | None = None

    def begin(self, request: GenerateRequest, resumed: list[int]) -> TokenMatcher | None:
        """Return a matcher; one thread at a time. Raises Refused (400)."""
        if request.grammar is None:
            return None
        try:
            if self._grammars is None:
                self._grammars = TokenGrammars(self._loaded.tokenizer, self._loaded.vocab_size)
            return self._grammars.begin(request.grammar, resumed)
        except GrammarError as error:
            raise refused(request, error) from None

    def mask(self, sequences: list[Sequence], logits_NV: Tensor) -> dict[int, Refused]:
        """Mask forbidden tokens in place. Return the rows whose grammar failed."""
        allowed = dict[int, npt.NDArray[np.bool_]]()
        failed = dict[int, Refused]()
        for row, sequence in enumerate(sequences):
            if sequence.matcher is not None:
                try:
                    allowed[row] = sequence.matcher.allowed()
                except GrammarError as error:
                    failed[row] = refused(sequence.request, error)
        if allowed:
            index = to_device(np.array([*allowed]), logits_NV.device)
            allowed_MV = to_device(np.stack([*allowed.values()]), logits_NV.device)
            logits_NV[index] = logits_NV[index].masked_fill(~allowed_MV, float("-inf"))
        return failed

    def advance(
        self, sequences: list[Sequence], token_ids: npt.NDArray[np.int64], failed: dict[int, Refused]
    ) -> None:
        """Pass drawn tokens to the matchers; add rows that fail to `failed`."""
        for row, sequence in enumerate(sequences):
            if sequence.matcher is not None and row not in failed:
                try:
                    sequence.matcher.take(int(token_ids[row]))
                except GrammarError as error:
                    failed[row] = refused(sequence.request, error)


def refused(request: GenerateRequest, error: GrammarError) -> Refused:
    return Refused(
        400,
        f"request {request.request_id} has a grammar that cannot be followed: {error}",
        rule="a grammar is llguidance's Lark text, within the limits of asyncrl/messages/token_grammars.py",
        way_out="make the schema smaller or simpler.",
    )
