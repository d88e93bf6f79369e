"""Texts become the tokens that lm_eval makes of them."""

import json
import random

import numpy as np
import pytest
from helpers.drawn_tokenizers import BYTES, template
from helpers.hf_folder import TEXTS, byte_level_tokenizer

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.eval.harness.encoding import HarnessError, QueryEncoder

pytestmark = pytest.mark.quick

LENGTH = 12


def encoder(*, adds_bos: bool, bos: int | None = 1, length: int = LENGTH) -> QueryEncoder:
    definition = json.loads(byte_level_tokenizer().to_str())
    if adds_bos:
        definition["post_processor"] = template(("<s>",), (), ("<pad>", "<s>"))
    tokenizer = FastTokenizer(definition, name="small", bos_id=bos, eos_id=2)
    return QueryEncoder(tokenizer, tokenizer.frame, length)


def pairs(seed: int) -> list[tuple[str, str]]:
    """Contexts with and without spaces at their end, empty ones, long ones, and some that begin with BOS."""
    dice = random.Random(seed)
    words = [word for text in (TEXTS[0], TEXTS[2]) for word in text.split()]
    found = []
    for n in range(60):
        context = " ".join(dice.choices(words, k=dice.randrange(0, 12))) + dice.choice(["", " ", "\n", "  "])
        found.append((("<s>" if n % 7 == 0 else "") + context, dice.choice(["", " "]) + dice.choice(words)))
    return found


@pytest.mark.parametrize("adds_bos", [False, True])
def test_pairs_are_lm_evals(adds_bos: bool):
    """By lm_eval's own `_encode_pair`, and HFLM's rule for what is too long."""
    template = pytest.importorskip("lm_eval.api.model", reason="lm_eval is not installed").TemplateLM
    own = encoder(adds_bos=adds_bos)

    class Judge(template):
        eot_token_id = 2
        prefix_token_id = 1
        _loglikelihood_tokens = loglikelihood_rolling = generate_until = None

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            ids = own.tokenizer.encode_batch([string])[0].tolist()
            begins = adds_bos and add_special_tokens is not False and not string.startswith("<s>")
            return [1, *ids] if begins else ids

    judge = Judge()
    asked = [pair for pair in pairs(0) if not pair[0] or pair[0].strip()]
    found = own.encode_pairs(asked, [str(n) for n in range(len(asked))])
    for (context, continuation), question in zip(asked, found, strict=True):
        if context:
            before, after = judge._encode_pair(context, continuation)
        else:
            before, after = [1], judge.tok_encode(continuation, add_special_tokens=False)
        whole = (list(before) + list(after))[-(LENGTH + 1) :]
        assert question.inputs.tolist() == whole[:-1]
        assert question.targets.tolist() == list(after)
        assert question.truncated == max(0, len(before) + len(after) - LENGTH - 1)
    assert any(each.truncated for each in found) and any(not context for context, _ in asked)


@pytest.mark.parametrize("length", [3, 5, 12])
def test_windows_are_lm_evals(length: int):
    utils = pytest.importorskip("lm_eval.utils", reason="lm_eval is not installed")
    own = encoder(adds_bos=True, length=length)
    for text in [*TEXTS, "a", "", "the cat sat"]:
        (ids,) = own.encode([text])
        windows = list(
            map(
                utils.make_disjoint_window,
                utils.get_rolling_token_windows(
                    token_list=ids.tolist(), prefix_token=1, max_seq_len=length, context_len=1
                ),
            )
        )
        found = own.rolling_windows(text)
        assert [each.targets.tolist() for each in found] == [list(after) for _, after in windows]
        assert [each.inputs.tolist() for each in found] == [[*a, *b][-(length + 1) :][:-1] for a, b in windows]
        # Each token once, in order.
        assert np.concatenate([each.targets for each in found]).tolist() == ids.tolist()


def test_what_cannot_be_scored_is_listed():
    own = encoder(adds_bos=False)
    long = "x" * 5 + " 1234567890" * 3
    with pytest.raises(HarnessError) as told:
        own.encode_pairs(
            [("the cat", " sat"), ("the cat", ""), ("the cat", long)], ["a, document 0", "b", "c, document 7"]
        )
    first, second = str(told.value).splitlines()
    assert first == "b: the answer '' has no token after its context"
    assert second.startswith("c, document 7: the answer 'xxxxx 1234567890") and "the context of 12" in second
    many = own.encode_pairs([("the cat", " sat")] * 3, ["a"] * 3)
    assert len({each.inputs.tobytes() for each in many}) == 1


def test_a_tokenizer_without_ends_is_named():
    bare = FastTokenizer(json.loads(byte_level_tokenizer().to_str()), name="small")
    with pytest.raises(HarnessError, match="small: the tokenizer has neither BOS nor EOS"):
        QueryEncoder(bare, bare.frame, LENGTH).encode_pairs([("", "the cat")], ["a"])


@pytest.mark.parametrize("processor", [None, "bytes", "ends", "bos", "sequence"])
def test_whether_a_tokenizer_puts_bos_before_a_text_is_read_off_its_definition(processor: str | None):
    bos, ends = (template(*sides, ("<pad>", "<s>", "</s>")) for sides in ((["<s>"], []), ([], ["</s>"])))
    known = {"bytes": BYTES, "ends": ends, "bos": bos, "sequence": {"type": "Sequence", "processors": [BYTES, bos]}}
    definition = json.loads(byte_level_tokenizer().to_str())
    definition["post_processor"] = None if processor is None else known[processor]
    tokenizer = FastTokenizer(definition, name="small", bos_id=1)
    assert tokenizer.adds_bos is (processor in ("bos", "sequence"))
    assert tokenizer.frame.suffix == ((2,) if processor == "ends" else ())
    assert FastTokenizer(definition, name="small", bos_id=None).adds_bos is False
    for enforce in (True, False):
        frame = tokenizer.frame.with_bos(1, enforce=enforce)
        assert frame.prefix == ((1,) if enforce else ()) and frame.suffix == tokenizer.frame.suffix
    with pytest.raises(ValueError, match="enforce_bos: true, and the files of the tokenizer name no BOS"):
        tokenizer.frame.with_bos(None, enforce=True)
