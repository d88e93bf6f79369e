"""What a chat template is given, against `apply_chat_template` over templates in the styles of published ones."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_templates import DOCUMENTS, NAMED, TEMPLATES, TOOL, drawn_messages
from helpers.drawn_tokenizers import build
from transformers import AutoTokenizer

from levanter.compat.open import load_tokenizer
from levanter.data.chat import ChatTemplate, select_template
from levanter.data.errors import DataError


def _folder(folder: Path, template: object, **settings: Any) -> Path:
    folder.mkdir()
    build("byte level").save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def _written(render: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """What a call returns, or the type of what it raises: Jinja's errors there, ours here."""
    try:
        return render(*args, **more)
    except Exception as error:  # noqa: BLE001
        return type(error)


@pytest.fixture(scope="module", params=[{}, {"bos_token": "<s>", "pad_token": "<pad>", "image_token": "<|img|>"}])
def pair(request, tmp_path_factory):
    folder = _folder(tmp_path_factory.mktemp("templates") / "model", None, **request.param)
    return load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_transformers_writes(pair, name: str):
    ours, theirs = pair
    template = select_template(ours, TEMPLATES[name])
    assert template is not None
    for seed, tools, documents, prompt in itertools.product(range(4), ([TOOL], [], None), (DOCUMENTS, None), (0, 1)):
        messages = drawn_messages(random.Random(seed))
        more = {"tools": tools, "documents": documents, "add_generation_prompt": bool(prompt), "custom": seed % 2}
        call = dict(chat_template=TEMPLATES[name], tokenize=False, **more)
        expected = _written(theirs.apply_chat_template, messages, **call)
        actual = _written(template.render, messages, {k: v for k, v in more.items() if v is not None}, "here")
        if isinstance(expected, str):
            assert actual[0] == expected, (name, messages, more)
        else:
            # A form that the template understands is written; but what it refuses itself stays refused.
            assert actual is DataError or name != "refuses", (name, expected, actual)


@pytest.mark.parametrize("where", ["settings", "files", "no default"])
def test_templates_with_names(tmp_path, where: str):
    named = NAMED if where != "no default" else NAMED[1:]
    folder = _folder(tmp_path / "model", named if where != "files" else "not this one")
    if where == "files":
        (folder / "additional_chat_templates").mkdir()
        for one in named:
            default = one["name"] == "default"
            place = "chat_template.jinja" if default else f"additional_chat_templates/{one['name']}.jinja"
            (folder / place).write_text(one["template"])
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for tools, name in itertools.product(([TOOL], [], None), (None, "rag", "tool_use")):
        messages, template = drawn_messages(random.Random(1)), select_template(ours, name)
        assert template is not None
        expected = _written(theirs.apply_chat_template, messages, chat_template=name, tools=tools, tokenize=False)
        actual = _written(template.render, messages, {} if tools is None else {"tools": tools}, "here")
        assert actual[0] == expected if isinstance(expected, str) else actual is DataError
    if where == "no default":
        template = select_template(ours, None)
        assert template is not None
        with pytest.raises(DataError, match="rag, tool_use, and none is named default: set chat_template to a name"):
            template.render([{"role": "user", "content": "hi"}], {}, "here")


def test_a_text_out_of_proportion_is_refused_before_it_is_tokenized():
    """A short conversation, of which the template makes 16 MiB: minutes of work and then nothing of use."""
    text = "{% for n in range(16) %}{{ 'a' * 1000000 }}{% endfor %}"
    with pytest.raises(DataError, match="writes 16,000,000 characters for a conversation of"):
        ChatTemplate(text=text).render([{"role": "user", "content": "hi"}], {}, "here")
    # A long conversation may have a long text.
    long = [{"role": "user", "content": "b" * 2_000_000}]
    assert len(ChatTemplate(text="{{ messages[0].content }}").render(long, {}, "here")[0]) == 2_000_000


@pytest.mark.parametrize(
    "text", ["{{ x | tojson(separators=('b' * 999999, ':')) }}", "{{ x | tojson(indent=900000) }}"]
)
def test_json_of_a_template_is_bounded(text: str):
    variables = {"x": [list(range(100))] * 100}
    with pytest.raises(DataError, match="more than 16,777,216 characters"):
        ChatTemplate(text=text).render([], variables, "here")
