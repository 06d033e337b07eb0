"""The model made from nothing: same spec, same bytes; a tokenizer that gives back what it got."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import TINY_ARCHITECTURE, TINY_CHARACTERS, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.messages.base import ErrorBody, find_fatal
from asyncrl.rollouts.tokenizer import HFChatTokenizer
from asyncrl.trainer.model.scratch import main, make_character_tokenizer

TOKENIZER = make_character_tokenizer(TINY_CHARACTERS)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    seeds = {"a": 1, "b": 1, "c": 2}
    first, again, other = (
        folder_bytes(make_tiny_model(tmp_path / name, seed=seed)) for name, seed in seeds.items()
    )
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*seeds], "no unfinished folder stays behind"


def test_the_folder_opens_with_the_auto_classes(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert model.config.vocab_size == len(tokenizer) == 6 + len(TINY_CHARACTERS)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == end
    text = "a  b, c\n.\n? 12 ."
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(alphabet=TINY_CHARACTERS))
def test_decoding_gives_back_every_text_of_the_alphabet_with_one_token_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_the_chat_template_ends_with_the_assistants_turn() -> None:
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    text = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>be kind<|im_end|><|user|>hi<|im_end|><|assistant|>"
    assert len(TOKENIZER.encode(text)) == 1 + 7 + 1 + 1 + 2 + 1 + 1, "each special token is one token"
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == "be kindhi"


def test_with_a_tool_role_there_is_one_more_special_token_and_chats_with_tool_calls_are_rendered(
    tmp_path: Path,
) -> None:
    tokenizer = make_character_tokenizer(TINY_CHARACTERS, has_tool_role=True)
    assert len(tokenizer) == len(TOKENIZER) + 1
    tokenizer.save_pretrained(tmp_path)
    chats = HFChatTokenizer(tmp_path)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    text = chats.render(chat, tools=[{"type": "function", "function": {"name": "add"}}])
    marks = "<|user|>1+2<|im_end|><|assistant|><|im_end|><|tool|>3<|im_end|><|assistant|>"
    assert text == chats.render(chat) == marks, "tools are not written"
    assert len(chats.encode(text)) == 7 + 4, "one token a character, one a mark"


def test_a_spec_that_makes_no_model_ends_with_what_to_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fatal(**values: object) -> ErrorBody:
        spec = tmp_path / "spec.json"
        scratch = {"architecture": TINY_ARCHITECTURE, "characters": TINY_CHARACTERS}
        spec.write_text(
            json.dumps({"out": str(tmp_path / "model"), "seed": 0, "scratch": scratch, **values}),
            encoding="utf-8",
        )
        monkeypatch.setattr(sys, "argv", ["scratch", "--spec", str(spec)])
        with pytest.raises(SystemExit):
            main()
        error = find_fatal(capsys.readouterr().err)
        assert error is not None
        assert error.way_out
        return error

    for architecture, words in (
        ({"model_type": "qwen33"}, "qwen33"),
        ({**TINY_ARCHITECTURE, "hiden_size": 3}, "a qwen3 config does not know: hiden_size"),
        ({"hidden_size": 8}, "no model_type"),
    ):
        assert words in fatal(scratch={"architecture": architecture, "characters": "ab"}).error
    (tmp_path / "model").mkdir()
    assert "exists already" in fatal().error
