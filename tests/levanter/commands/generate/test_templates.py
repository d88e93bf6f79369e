"""Chat templates of a configuration: Jinja, or a file that has it."""

import json

import pytest
from helpers.drawn_tokenizers import template
from helpers.hf_folder import byte_level_tokenizer

from levanter.commands.generate.plan import template_checks
from levanter.commands.generate.prompts import template_text
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data.tokenizer import bos_note

pytestmark = pytest.mark.quick

JINJA = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_template_is_written_down_or_in_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(JINJA + "\n", encoding="utf-8")
    assert template_text(None) is None
    assert template_text(JINJA) == JINJA
    assert template_text(str(path)) == JINJA + "\n"
    assert not [*template_checks(None), *template_checks(JINJA), *template_checks(str(path))]
    (missing,) = template_checks(str(tmp_path / "chta.jinja"))
    assert "no such file, and no Jinja either" in missing.message and missing.error is not None


@pytest.mark.parametrize("text", ["{{", "{% for m in messages %}", "{{ a b }}\n", "{% generation %}"])
def test_a_template_that_is_not_jinja_is_an_error_of_the_plan(tmp_path, text: str):
    """Otherwise only requests with messages would report it, each with a 400."""
    (tmp_path / "chat.jinja").write_text(text)
    for source in (text, str(tmp_path / "chat.jinja")):
        (check,) = template_checks(source)
        assert check.status == "error" and check.error is not None and "not a Jinja template" in check.message


def test_names_of_templates_and_bos_that_the_tokenizer_does_not_have():
    definition = json.loads(byte_level_tokenizer().to_str())
    named = FastTokenizer(definition, name="made", chat_template={"rag": JINJA})
    assert not [*template_checks("rag", named)] and [*template_checks("default", named)]
    note = {"what": "document", "key": "data.enforce_bos"}
    assert bos_note(named, enforce=True, **note) is None, "there is no BOS"
    tokenizer = FastTokenizer(definition, name="made", bos_id=1)
    line = "BOS before each document (`data.enforce_bos`), which this tokenizer does not write by itself"
    assert bos_note(tokenizer, enforce=True, **note) == line and bos_note(tokenizer, enforce=False, **note) is None
    definition["post_processor"] = template(["<s>"], [], ["<pad>", "<s>"])
    assert bos_note(FastTokenizer(definition, name="made", bos_id=1), enforce=True, **note) is None


@pytest.mark.parametrize(("text", "said"), [(b"\xff\xfe", "not UTF-8 at byte 0"), (b"a" * ((1 << 20) + 1), "1 MiB")])
def test_what_is_no_template_is_refused(tmp_path, text, said):
    path = tmp_path / "chat.jinja"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=said):
        template_text(str(path))
