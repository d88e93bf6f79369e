"""Prompts without text, over drawn tokenizers: the special tokens of `AutoTokenizer`, or else BOS, or refused."""

import logging

import pytest
from helpers.drawn_tokenizers import write_drawn
from transformers import AutoTokenizer

from levanter.compat.open import load_tokenizer
from levanter.inference.prompts import PromptReader, PromptRequest, PromptRules
from levanter.inference.requests import SamplingParams
from levanter.inference.scheduler import Schedule

CONTEXT = 64
NOTE = "a prompt without text begins with BOS, which this tokenizer does not write by itself"


def compare(folder, seed: int, caplog) -> None:
    case = write_drawn(folder, seed)
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    framed, bos = theirs("").input_ids, theirs.bos_token_id
    schedule = Schedule(rows=2, pages=2, page_size=CONTEXT, context=CONTEXT, buckets=((1, 8),), fixed=True)
    for enforce in (None, False):
        reader = PromptReader(ours, schedule, PromptRules(vocab_size=512, enforce_bos=enforce))
        caplog.clear()
        prompt = PromptRequest(line=1, id="1", prompt="", params=SamplingParams(max_tokens=4))
        without_bos = framed[1:] if framed[:1] == [bos] else framed
        wanted = (framed or [bos]) if enforce is None else without_bos
        if wanted in ([], [None]):
            with pytest.raises(ValueError, match="prompt: empty, and there is no BOS to begin with"):
                reader.request(prompt)
            continue
        with caplog.at_level(logging.INFO):
            requests = [reader.request(prompt) for _ in range(2)]
        assert [list(request.tokens) for request in requests] == [wanted] * 2, case
        assert caplog.text.count(NOTE) == (not framed), case


@pytest.mark.parametrize("seed", range(12))
def test_a_prompt_without_text(tmp_path, caplog, seed):
    compare(tmp_path / "drawn", seed, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 380))
def test_a_prompt_without_text_at_length(tmp_path, caplog, seed):
    compare(tmp_path / "drawn", seed, caplog)
