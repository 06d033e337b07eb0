"""Small real tokenizers of the kinds that chat models have, trained on a few lines.
They differ in how tokens become text.
"""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AddedToken, PreTrainedTokenizerFast

from asyncrl.rollouts.tokenizer import HFChatTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Der schnelle braune Fuchs; Grüße, größer, 12 + 30 = 42.",
    'He calls {"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2, 3]}} and waits.\n\n',
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f600 \U0001f680 caf\u00e9 na\u00efve \u20ac100",
]
BOS = "<|begin_of_text|>"
END = "<|eot_id|>"
START = "<|start_header_id|>"
PYTHON = "<|python_tag|>"
SPECIAL = [BOS, END, START, PYTHON, "<unk>"]

BOS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant\\n\\n' }}{% endif %}"
)
"""Like Llama's: it writes the text of the first token itself."""


def byte_level() -> Tokenizer:
    """Bytes are merged, so that a character may lie over several tokens. Its
    post-processor puts BOS first, like Llama's.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    special = [(BOS, tokenizer.token_to_id(BOS))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=special
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Pieces with a mark for the space before a word; text in no piece becomes bytes,
    which are text only as a whole run.
    """
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        *SPECIAL,
        *single_bytes,
        "▁",
        *string.ascii_lowercase,
        *("".join(pair) for pair in merges),
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def save(
    tokenizer: Tokenizer, folder: Path, *, markers: tuple[str, ...] = ()
) -> HFChatTokenizer:
    """Write it as a model folder has it, and open it. `markers` are added tokens that
    are not special, like Qwen's <tool_call>.
    """
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    settings = {
        "bos_token": BOS,
        "eos_token": END,
        "unk_token": "<unk>",
        "chat_template": BOS_TEMPLATE,
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **settings
    )
    fast.save_pretrained(folder)
    return HFChatTokenizer(folder)
