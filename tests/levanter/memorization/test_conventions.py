"""Presets are the conventions that the studies state; settings on top of one make it custom."""

import pytest

from levanter.memorization.conventions import CUSTOM, convention, preset_name
from levanter.memorization.results import FULL, TOP_40, Scheme

pytestmark = pytest.mark.quick


def test_the_paper_takes_bos_40_tokens_10_characters_and_no_repetition():
    paper = convention("paper")
    windowing = paper.windowing
    assert (windowing.window_tokens, windowing.prefix_tokens, windowing.bos) == (100, 50, True)
    assert (windowing.token_mode, windowing.stride_chars, windowing.slice_chars) == (False, 10, 800)
    assert windowing.drop_duplicates and paper.scheme == TOP_40
    assert windowing.text_tokens == 99, "BOS is one of the 100, so the prefix is BOS and 49 tokens"


def test_levanter_takes_every_fifth_token_and_the_whole_vocabulary():
    ours = convention("levanter")
    assert ours.windowing.token_mode and ours.windowing.stride_tokens == 5
    assert not ours.windowing.bos and not ours.windowing.drop_duplicates and ours.scheme == FULL


def test_without_a_preset_upstreams_defaults_hold():
    upstream = convention(None)
    windowing = upstream.windowing
    assert (windowing.window_tokens, windowing.prefix_tokens, windowing.bos) == (100, 50, False)
    assert (windowing.token_mode, windowing.stride_chars, windowing.slice_chars) == (False, 10, 2000)
    assert windowing.stride_tokens == 1 and upstream.scheme == FULL


def test_a_convention_knows_its_name():
    assert preset_name(convention("paper")) == "paper"
    assert preset_name(convention("levanter")) == "levanter"
    assert preset_name(convention(None, token_mode=True, stride_tokens=5)) == "levanter"
    # A setting of the other mode means nothing.
    assert preset_name(convention("levanter", slice_chars=77)) == "levanter"
    assert preset_name(convention("paper", stride_tokens=9)) == "paper"
    assert preset_name(convention("paper", stride_chars=20)) == CUSTOM
    assert preset_name(convention("paper", scheme=Scheme(top_k=20))) == CUSTOM
    assert preset_name(convention(None)) == CUSTOM


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="preset: 'papr' is not one of levanter, paper"):
        convention("papr")
