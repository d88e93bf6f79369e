"""Chat templates of a configuration: Jinja, or a file that has it."""

import pytest

from levanter.commands.generate.plan import template_checks
from levanter.commands.generate.prompts import template_text

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


@pytest.mark.parametrize(("text", "said"), [(b"\xff\xfe", "not UTF-8 at byte 0"), (b"a" * ((1 << 20) + 1), "1 MiB")])
def test_what_is_no_template_is_refused(tmp_path, text, said):
    path = tmp_path / "chat.jinja"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=said):
        template_text(str(path))
