"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_tokenizers import SPECIAL, byte_fallback, byte_level, save
from tokenizers import AddedToken, normalizers, pre_tokenizers

from asyncrl.base.errors import ConfigError
from asyncrl.rollouts.tokenizer import HFChatTokenizer

CHAT = [{"role": "user", "content": "2+2=?"}]


def test_tokenizer_needs_no_torch(tiny_model_dir: Path) -> None:
    code = (
        "import sys; from asyncrl.rollouts.tokenizer import HFChatTokenizer; "
        f"HFChatTokenizer({str(tiny_model_dir)!r}).encode_chat({CHAT!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_folder_without_template_or_tokenizer_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model_dir, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(
        ConfigError, match=r"has no chat template.*\n  Way out: set model.chat_template"
    ):
        HFChatTokenizer(bare)
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        HFChatTokenizer(tmp_path)


@pytest.fixture(scope="module")
def bos_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFChatTokenizer:
    return save(byte_level(), tmp_path_factory.mktemp("tokenizer") / "bos")


def test_chat_ids_equal_transformers(bos_tokenizer: HFChatTokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(bos_tokenizer.model_path)
    answer = {"role": "assistant", "content": "Grüße \U0001f600"}
    chat = [*CHAT, answer, {"role": "user", "content": "  42\n"}]
    expected = reference.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    ids = bos_tokenizer.encode(bos_tokenizer.render(chat))
    assert ids == bos_tokenizer.encode_chat(chat) == tuple(expected)
    assert ids.count(reference.bos_token_id) == 1
    assert reference("a")["input_ids"][0] == reference.bos_token_id


# without surrogates; st.text() would first spend seconds on a table of all characters
CHARACTERS = st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)
PIECES = st.lists(CHARACTERS.map(chr), max_size=8).map("".join)
PIECES |= st.sampled_from([*SPECIAL, "the fox ", "\n\n"])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(PIECES, max_size=6).map("".join))
def test_any_text_gives_the_ids_that_transformers_gives(
    bos_tokenizer: HFChatTokenizer, text: str
) -> None:
    reference = bos_tokenizer._tokenizer
    ids = bos_tokenizer.encode(text)
    assert ids == tuple(reference.encode(text, add_special_tokens=False))
    for skip in (True, False):
        expected = reference.decode(list(ids), skip_special_tokens=skip)
        assert bos_tokenizer.decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ raise_exception('only one system message') }}", "only one system message"),
        ("{{ messages.__class__.__mro__ }}", "safe"),  # templates run in a sandbox
    ],
)
def test_template_refusal_is_a_value_error(
    tiny_model_dir: Path, tmp_path: Path, text: str, said: str
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(text)
    with pytest.raises(
        ValueError, match=f"the chat template refuses these messages: .*{said}"
    ):
        HFChatTokenizer(tiny_model_dir, chat_template=template).render(CHAT)


def test_tool_arguments_reach_a_template_in_its_form(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    said = '{"b": 1.50,"a": "x"}'
    function: dict[str, Any] = {"name": "f", "arguments": said}
    call = {"id": "1", "type": "function", "function": function}
    chat: list[Any] = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]

    def rendered(expression: str) -> str:
        template.write_text(
            "{% set arguments = messages[-1].tool_calls[0].function.arguments %}"
            + expression
        )
        return HFChatTokenizer(tiny_model_dir, chat_template=template).render(chat)

    assert rendered("{{ arguments | tojson }}") == '{"b": 1.5, "a": "x"}', (
        "an object: not quoted once more"
    )
    wants_text = "{{ 'f(' + arguments + ')' }}"
    assert rendered(wants_text) == 'f({"b": 1.5, "a": "x"})'
    for malformed in ("", None, '{"a', "[1]", 3):
        function["arguments"] = malformed
        assert rendered(wants_text) == "f({})"


@pytest.mark.parametrize(
    "more", [{}, {"description": None, "parameters": None}, {"parameters": {}}]
)
def test_template_may_demand_what_a_tool_may_lack(
    tiny_model_dir: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    """GPT-OSS and Apertus demand a description, Seed-OSS properties."""
    template = tmp_path / "chat.jinja"
    tool = {"type": "function", "function": {"name": "f", **more}}
    written = "{% set f = tools[0].function %}{{ f | tojson }}"
    for demanded, function in (
        ("", {"name": "f", **more}),
        (
            "{{ f.description + f.parameters.type }}",
            {
                "name": "f",
                "description": "",
                "parameters": {"type": "object", "properties": {}},
            },
        ),
    ):
        template.write_text(written + demanded)
        text = HFChatTokenizer(tiny_model_dir, chat_template=template).render(
            CHAT, tools=[tool]
        )
        assert json.loads(text.removesuffix("object")) == function


@pytest.mark.parametrize(
    ("demanded", "ids"), [("", ["own", "", ""]), ("r", ["own", "a", "b"])]
)
def test_results_get_ids_where_a_template_demands_them(
    tiny_model_dir: Path, tmp_path: Path, demanded: str, ids: list[str]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages if m.role == 'tool' %}{{ m.tool_call_id }};"
        f"{{{{ raise_exception('no') if '{demanded}' and not m.tool_call_id }}}}"
        "{% endfor %}"
    )
    calls = [
        {"id": name, "function": {"name": "f", "arguments": {}}}
        for name in ("a", "own", "b")
    ]
    results = [{"role": "tool", "content": "x"}] * 2
    chat: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "own", "content": "x"},
        *results,
    ]
    renderer = HFChatTokenizer(tiny_model_dir, chat_template=template)
    assert renderer.render(chat).split(";")[:-1] == ids


def test_call_ids_take_the_form_that_a_template_demands(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Mistral's templates demand nine alphanumerics."""
    template = tmp_path / "chat.jinja"
    chat: list[dict[str, Any]] = []
    for call_id in ("functions.f:0", "abcdefgh1"):
        call = {
            "id": call_id,
            "type": "function",
            "function": {"name": "f", "arguments": {}},
        }
        chat.append({"role": "assistant", "tool_calls": [call]})
        chat.append({"role": "tool", "tool_call_id": call_id, "content": "1"})
    ids = "{% for one in messages %}{{ one.tool_call_id or one.tool_calls[0].id }} {% endfor %}"
    demand = "{% if messages[1].tool_call_id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}"
    template.write_text(ids)
    assert (
        HFChatTokenizer(tiny_model_dir, chat_template=template).render(chat).split()[1]
        == "functions.f:0"
    )
    form = "{{ messages[0].tool_calls[0].function.arguments is mapping }}"
    template.write_text(demand + ids + form)
    called, result, *others = (
        HFChatTokenizer(tiny_model_dir, chat_template=template).render(chat).split()
    )
    assert re.fullmatch("[a-zA-Z0-9]{9}", called)
    # Mistral's templates would quote a text.
    assert [result, *others] == [called, "abcdefgh1", "abcdefgh1", "True"]


def test_template_writes_the_date_that_it_is_given(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% macro day() %}{{ strftime_now('%d %b %Y %H') }}{% endmacro %}{{ day() }}"
    )
    for year in (2024, 2031):
        day = datetime.date(year, 7, 26)
        tokenizer = HFChatTokenizer(tiny_model_dir, chat_template=template, now=day)
        assert tokenizer.render(CHAT) == f"26 Jul {year} 00"


MARKS = ("<|q|>", "<|x|>", "<|user|>", "<|end|>")
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{{ tools }}"
)
GIVEN = [
    "<|q|>",
    "the <|q|>the",
    "a<|q|> <|q|>\n the",
    "\n<|q|>",
    "<|<|q|>",
    " the the<|q|>",
]


@pytest.mark.parametrize("strips", [{}, {"rstrip": True}, {"lstrip": True}])
@pytest.mark.parametrize("kind", ["bytes", "prepend", "always", "first", "never"])
def test_names_of_special_tokens_in_messages_are_text(
    kind: str, strips: Any, tmp_path: Path
) -> None:
    """The reference is another text, with j in the place of q, whose ids are then
    exchanged.
    """
    backend = byte_level() if kind == "bytes" else byte_fallback()
    if kind not in ("bytes", "prepend"):
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme=kind, split=False
        )
    backend.add_special_tokens(
        [AddedToken(mark, normalized=False, **strips) for mark in MARKS]
    )
    save(backend, tmp_path)
    template = tmp_path / "marked.jinja"
    template.write_text(MARKED)
    parsed = HFChatTokenizer(tmp_path, chat_template=template)
    plain = HFChatTokenizer(
        tmp_path, chat_template=template, parse_special_tokens=False
    )
    q, j = (backend.token_to_id(letter) for letter in "qj")
    for text in GIVEN:
        answer = {"role": "assistant", "content": "<|x|>"}
        chats = [
            [{"role": "user", "content": given}, answer]
            for given in (text, text.replace("q", "j"))
        ]
        tools = [[{"description": given}] for given in (text, text.replace("q", "j"))]
        ids = plain.encode(plain.render(chats[0], tools=tools[0]))
        expected = parsed.encode(parsed.render(chats[1], tools=tools[1]))
        assert ids == tuple(q if token == j else token for token in expected)
        assert ids.count(backend.token_to_id("<|x|>")) == 1, (
            "an answer's special token stays"
        )


def test_lone_surrogate_is_refused(bos_tokenizer: HFChatTokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate"):
        bos_tokenizer.encode("ab\ud800")


def test_end_ids_equal_the_embedded_engines(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from asyncrl_servers.embedded.decoder import _eos_ids

    folder = tmp_path / "several"
    shutil.copytree(tiny_model_dir, folder)
    for name, values in (
        ("generation_config", {"eos_token_id": [7, 5]}),
        ("config", {"eos_token_id": 9}),
    ):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    of_engine = _eos_ids(
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    end = HFChatTokenizer(tiny_model_dir).encode("<|im_end|>")[0]
    assert HFChatTokenizer(folder).end_ids == of_engine == {7, 5, 9, end}
    known = json.loads((tiny_model_dir / "config.json").read_text())["vocab_size"]
    assert HFChatTokenizer(tiny_model_dir).vocab_size == known, (
        "it may be more than the vocabulary has"
    )
