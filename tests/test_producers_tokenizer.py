"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.producers import HFChatTokenizer

CHAT = [{"role": "user", "content": "2+2=?"}]


def test_a_chat_becomes_the_ids_that_transformers_gives_and_back(tiny_model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = HFChatTokenizer(tiny_model_dir)
    reference = AutoTokenizer.from_pretrained(tiny_model_dir)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    ids = tokenizer.encode_chat(CHAT)
    assert ids == tuple(expected)
    assert tokenizer.decode(ids) == "2+2=?", "special tokens are left out"


def test_it_needs_no_torch(tiny_model_dir: Path) -> None:
    code = (
        "import sys; from asyncrl.producers import HFChatTokenizer; "
        f"t = HFChatTokenizer({str(tiny_model_dir)!r}); t.decode(t.encode_chat({CHAT!r})); "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_template_file_replaces_the_tokenizers_own(tiny_model_dir: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}=")
    tokenizer = HFChatTokenizer(tiny_model_dir, chat_template=template)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == "2+2=?="


def test_a_tokenizer_without_a_template_is_refused_with_the_way_out(tiny_model_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model_dir, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"has no chat template.*\n  Way out: set model.chat_template"):
        HFChatTokenizer(bare)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        HFChatTokenizer(tmp_path)


def test_a_missing_template_file_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read model.chat_template="):
        HFChatTokenizer(tiny_model_dir, chat_template=tmp_path / "none.jinja")
