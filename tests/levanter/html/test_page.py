"""Pages of results: the template's pieces in their places, and data that cannot become markup."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter.html.page import result_page, script_json

_OWN = """<style>
.mine { color: red; }
</style>
<main>
<p id="mine"></p>
</main>
<script>
put(at("mine"), "b");
</script>
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.html"
    path.write_text(_OWN, encoding="utf-8")
    return path


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_own_pieces_follow_the_common_ones(own):
    page = result_page(own, {}, title="T", facts={})
    assert page.index("--page:") < page.index(".mine") < page.index("</style>")
    assert page.index('id="facts"') < page.index('id="mine"') < page.index("</main>")
    assert page.index("const put =") < page.index('put(at("mine"), "b")')
    assert page.count("<main>") == page.count("</main>") == 1


@pytest.mark.parametrize(
    "text", ["</script><script>alert(1)</script>", "/*SCRIPT*/", "<!--MAIN-->", "\\1", "\u2028 and \u2029", "😀 ü"]
)
def test_a_text_stays_a_text(own, text):
    page = result_page(own, {"texts": [text]}, title=text, facts={"of": text})
    assert data_of(page) == {"title": text, "facts": {"of": text}, "texts": [text]}
    assert page.count("</script>") == 2
    assert page.count('id="mine"') == 1


def test_a_number_that_is_none_is_refused(own):
    with pytest.raises(ValueError):
        result_page(own, {"score": float("nan")}, title="T", facts={})


@settings(deadline=None)
@given(st.text())
def test_any_text_stays_data(text):
    rendered = script_json({"text": text})
    assert json.loads(rendered)["text"] == text
    rendered.encode("utf-8")
    assert not set("<>&\u2028\u2029") & set(rendered)
