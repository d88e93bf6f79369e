"""Conversations as rows of training: what is refused, what is left out, and what a row has of a long one."""

import json

import numpy as np
import pytest
from helpers.hf_folder import byte_level_tokenizer

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data import DataError, StoreError, build_training
from levanter.data.config import DatasetComponent, LmDataConfig
from levanter.data.formats import ChatLmDatasetFormat
from levanter.data.sources import UrlDatasetSource

pytestmark = pytest.mark.quick

CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}END{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def tokenizer_with(template=CHATML) -> FastTokenizer:
    built = byte_level_tokenizer()
    built.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return FastTokenizer(
        json.loads(built.to_str()), name="made here", bos_id=1, eos_id=2, pad_id=0, chat_template=template
    )


TOKENIZER = tokenizer_with()


def said(*turns):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]}


def data_of(tmp_path, records, *, positions=64, tokenizer=TOKENIZER, cached=False, pack=None, more=None, **format):
    path = tmp_path / "talk.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    component = DatasetComponent(
        source=UrlDatasetSource(train_urls=[str(path)]), format=ChatLmDatasetFormat(**format), pack=pack
    )
    cache = str(tmp_path / "cache") if cached else None
    config = LmDataConfig(components={"talk": component}, cache_dir=cache, shuffle=False, **(more or {}))
    return build_training(config, tokenizer, positions=positions, batch_sizes=[(0, 1)], seed=0)


def rows(data):
    its = data.sets[0].rows
    return its.take(np.arange(len(its)))


def documents(data):
    """The ids of rows with one document each, without padding."""
    taken = rows(data)
    return [row[segment >= 0] for row, segment in zip(taken.tokens, taken.segment_ids, strict=True)]


def counted_text(data):
    """What counts of each row, as text, and the rest."""
    taken = rows(data)
    found = []
    for tokens, weights in zip(taken.tokens, taken.loss_weights, strict=True):
        target = np.concatenate([[False], weights[:-1] > 0])
        found.append(TOKENIZER.decode(tokens[target]))
    return found


def test_the_tokenizers_own_template_derived(tmp_path):
    data = data_of(tmp_path, [said("the cat?", "sat", "and?", "mat")])
    assert counted_text(data) == ["sat<|im_end|>\nmat<|im_end|>\n"]
    (line,) = [line for line in data.described if line.startswith("talk: ")]
    assert "the tokenizer's chat template (sha256 " in line and "derived (the template does not mark them)" in line
    (sample,) = data.samples
    assert "the first conversation, " in sample and "⟦sat<|im_end|>\n  ⟧<|im_start|>user" in sample
    ids = rows(data).tokens[0]
    assert f"ids: {' '.join(map(str, ids[:6].tolist()))}" in sample


def test_a_template_from_a_file_wins_and_is_of_the_store(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(CHATML.replace("{{ bos_token }}", ""))
    records = [said("the cat?", "sat")]
    more = {"chat_template": str(path)}
    data = data_of(tmp_path, records, cached=True, more=more)
    assert "its own chat template" in data.described[0]
    assert rows(data).tokens[0, 0] != TOKENIZER.bos_id
    assert "does not begin with <s> (id 1): its chat template writes none" in data.samples[0]
    identity = json.loads((tmp_path / "cache/talk/train/manifest.json").read_text())["identity"]["format"]
    assert identity["chat_template"].startswith("sha256 ") and identity["counted"] == "derived: agreement of ids"
    # Another template is another store, even under the same path; how rows are laid is not.
    data_of(tmp_path, records, cached=True, more=more, overlength="drop", pack="pad")
    for changed in ({"mask_user_turns": False}, {"turns": "split"}, {"roles": {"gpt": "assistant"}}):
        with pytest.raises(StoreError, match="this token store was built from something else"):
            data_of(tmp_path, records, cached=True, more=more, **changed)
    path.write_text(CHATML)
    with pytest.raises(StoreError, match="this token store was built from something else"):
        data_of(tmp_path, records, cached=True, more=more)
    with pytest.raises(DataError, match=r"chat_template: .*mien.jinja.*did you mean"):
        data_of(tmp_path, records, more={"chat_template": str(tmp_path / "mien.jinja")})


def test_turns(tmp_path):
    record = said("the cat?", "sat", "and?", "mat")
    assert counted_text(data_of(tmp_path, [record], turns="last")) == ["mat<|im_end|>\n"]
    split = data_of(tmp_path, [record], turns="split", pack=1)
    assert sorted(counted_text(split)) == ["mat<|im_end|>\n", "sat<|im_end|>\n"]
    assert int(rows(split).segment_ids.max()) == 0 and len(rows(split).tokens) == 2
    everything = data_of(tmp_path, [record], mask_user_turns=False)
    assert TOKENIZER.decode(rows(everything).tokens[0]).startswith("<s>" + counted_text(everything)[0])


def test_roles_of_other_formats(tmp_path):
    record = {"messages": [{"role": "human", "content": "the cat?"}, {"role": "gpt", "content": "sat"}]}
    with pytest.raises(
        DataError, match=r"talk\.jsonl:1: message 2: unknown role 'gpt'; known are human, user, .*\{gpt: …\}"
    ):
        data_of(tmp_path, [record], roles={"human": "user"})
    named = data_of(tmp_path, [record], roles={"human": "user", "gpt": "assistant"})
    assert counted_text(named) == ["sat<|im_end|>\n"]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": []}, r"the conversation is empty \('messages' has no message\)"),
        ({"messages": ["hi"]}, "message 1: expected an object with role and content, found str"),
        ({"messages": [{"content": "hi"}]}, r"message 1: has no role \(its keys are 'content'\)"),
        ({"messages": [{"role": "usr", "content": "hi"}]}, "unknown role 'usr'; did you mean `user`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"message 1: content\[0\]: 'image', and only text is read .*leave out records with other parts",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "message 1: content: missing"),
        ({**said("a", "b"), "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template: "),
        ({**said("a", "b"), "chat_template_kwargs": [1]}, "'chat_template_kwargs' is list, expected an object"),
        ({**said("a", "b"), "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages: "),
        (said("a \ud800", "b"), r"message 1: content: has U\+D800 at 2"),
        (said("\ufdd0a\ufdd1", "b"), r"message 1: content: has U\+FDD0 at 0"),
        (said("a", "<s>"), None),
        ({"messages": [{"role": "system", "content": "x"}]}, "talk' is empty: no conversation in which the assistant"),
    ],
)
def test_records_that_teach_nothing_or_the_wrong_thing(tmp_path, record, expected):
    if expected is None:
        assert counted_text(data_of(tmp_path, [record]))
        return
    with pytest.raises(DataError, match=expected):
        data_of(tmp_path, [record])


def test_two_beginnings_are_refused(tmp_path):
    twice = CHATML.replace("{{ bos_token }}", "{{ bos_token }}{{ bos_token }}")
    with pytest.raises(DataError, match=r"talk\.jsonl:1: begins with <s> \(id 1\) twice"):
        data_of(tmp_path, [said("a", "b")], chat_template=twice)


def test_answers_without_an_end(tmp_path):
    with pytest.raises(DataError, match=r"an answer ends in 'sat', not in a special token"):
        data_of(tmp_path, [said("the cat?", "sat")], chat_template=MARKED)
    assert counted_text(data_of(tmp_path, [said("a", "sat")], chat_template=MARKED, allow_unstopped=True)) == ["sat"]


def test_a_template_that_marks_nothing_of_what_was_said(tmp_path):
    other = MARKED.replace("'assistant'", "'model'")
    with pytest.raises(DataError, match=r"talk\.jsonl:1: nothing counts in the loss: the assistant has 1 messages"):
        data_of(tmp_path, [said("the cat?", "sat")], chat_template=other)


def test_what_was_refused_leaves_a_store_that_can_be_begun_anew(tmp_path):
    """Nobody is told to delete a folder in which there is nothing, having done what a refusal advised."""
    records = [said("the cat?", "sat")]
    with pytest.raises(DataError, match="set allow_unstopped: true"):
        data_of(tmp_path, records, chat_template=MARKED, cached=True)
    data = data_of(tmp_path, records, chat_template=MARKED, cached=True, allow_unstopped=True)
    assert counted_text(data) == ["sat"]
    with pytest.raises(StoreError, match="this token store was built from something else"):
        data_of(tmp_path, records, chat_template=MARKED, cached=True)


@pytest.mark.parametrize("cached", [False, True])
def test_conversations_without_an_answer_are_left_out_and_counted(tmp_path, cached):
    records = [said("the cat?"), said("the cat?", "sat"), said("and?")]
    data = data_of(tmp_path, records, cached=cached)
    assert counted_text(data) == ["sat<|im_end|>\n"]
    assert "2 conversations in which the assistant says nothing left out" in data.described[0]


LONG = said("the cat?", "sat " * 30, "and?", "mat")
LATE = said("the cat " * 30, "sat")
SHORT = said("the cat?", "sat")


@pytest.mark.parametrize("cached", [False, True])
def test_longer_than_a_row(tmp_path, cached):
    """A later piece of a conversation has no question: it is never a row of its own."""
    whole = data_of(tmp_path, [LONG, LATE, SHORT], positions=512, pack="pad")
    ids = documents(whole)
    (long,) = [row for row in ids if "mat" in TOKENIZER.decode(row)]
    (late,) = [row for row in ids if "the cat the cat" in TOKENIZER.decode(row)]
    short = min(ids, key=len)
    places = {"left": slice(None, 48), "right": slice(-48, None)}

    def kept(overlength):
        data = data_of(tmp_path, [LONG, LATE, SHORT], positions=48, pack="pad", overlength=overlength, cached=cached)
        return data, [row.tolist() for row in documents(data)]

    left, found = kept("left")
    # What the beginning of LATE has is a question alone.
    assert sorted(map(len, found)) == sorted([48, len(short)])
    assert long[places["left"]].tolist() in found
    assert "1 longer than a row truncated (their beginning is kept)" in left.described[0]
    assert "1 longer than a row left out: nothing counts in their beginning" in left.described[0]
    right, found = kept("right")
    assert long[places["right"]].tolist() in found and late[places["right"]].tolist() in found and len(found) == 3
    assert "2 longer than a row truncated (their end is kept)" in right.described[0]
    drop, found = kept("drop")
    assert len(found) == 1 and "2 longer than a row left out" in drop.described[0]
    with pytest.raises(DataError, match=r"data set 'talk': 2 of 3 are longer than a row of 48 tokens .* raise refuses"):
        kept("raise")
    with pytest.raises(DataError, match=r"all 1 are longer than a row of 16 tokens, and nothing is left of them"):
        data_of(tmp_path, [LATE], positions=16)
