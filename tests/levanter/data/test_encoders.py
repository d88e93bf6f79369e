"""Formats other than text: what counts in the loss, against the records themselves and against transformers."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.small_tokenizer import BOS, EOS, SmallTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from levanter.data import DataError, build_training, resolve_training
from levanter.data.chat import ChatTemplate
from levanter.data.config import DatasetComponent, LmDataConfig
from levanter.data.formats import ChatLmDatasetFormat, PrebuiltLmDatasetFormat, SupervisedLmDatasetFormat
from levanter.data.sources import UrlDatasetSource

TOKENIZER = SmallTokenizer()
TEMPLATE = """{%- if messages[0]['role'] == 'system' -%}
<sys>{{ messages[0]['content'] | trim }}</sys>
{% set messages = messages[1:] -%}
{%- endif -%}
{% for message in messages %}
{%- if message['role'] == 'user' -%}
<u>{{ message['content'] }}</u>
{% elif message['role'] == 'assistant' -%}
<a>{% generation %}{{ message['content'] }}{{ '</a>' }}{% endgeneration %}

{% else %}{{ raise_exception('unknown role ' ~ message['role']) }}{% endif -%}
{% endfor %}
{%- if style is defined %}[{{ style | tojson }}]{% endif %}"""

CONVERSATION = [
    {"role": "system", "content": " be brief "},
    {"role": "user", "content": "hi é"},
    {"role": "assistant", "content": "the 日本"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "bye"},
]


def config_of(tmp_path, records, format, *, parquet=False, **more):
    path = tmp_path / ("x.parquet" if parquet else "x.jsonl")
    if parquet:
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    pack = more.pop("pack", None)
    component = DatasetComponent(source=UrlDatasetSource(train_urls=[str(path)]), format=format, pack=pack)
    given = {"cache_dir": str(tmp_path / "cache"), "shuffle": False, **more}
    return LmDataConfig(components={"x": component}, **given)


def replace_format(config, **changed):
    component = config.components["x"]
    return replace(config, components={"x": replace(component, format=replace(component.format, **changed))})


def rows_of(config, *, positions=64, count=None):
    data = build_training(config, TOKENIZER, positions=positions, batch_sizes=[(0, 1)], seed=0)
    rows = data.sets[0].rows
    return rows.take(np.arange(len(rows) if count is None else count))


def pieces(rows):
    """The documents in rows: (ids, weights) of each, in the order of their ids."""
    found = []
    for tokens, weights, segments in zip(rows.tokens, rows.loss_weights, rows.segment_ids, strict=True):
        for one in range(segments.max() + 1):
            here = segments == one
            found.append((tokens[here].tolist(), weights[here].tolist()))
    return sorted(found)


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_prebuilt(tmp_path, parquet, cached):
    records = [{"input_ids": [5, 6, 7, 8], "w": [1.0, 0.5, 0.0, 1.0]}, {"input_ids": [9, 10, 11], "w": [0.0, 2.0, 1.0]}]
    more = {} if cached else {"cache_dir": None}
    plain = config_of(tmp_path, records, PrebuiltLmDatasetFormat(), parquet=parquet, **{"cache_dir": None})
    assert pieces(rows_of(plain)) == [([5, 6, 7, 8], [1, 1, 1, 0]), ([9, 10, 11], [1, 1, 0])]
    weighted = PrebuiltLmDatasetFormat(loss_weights_key="w")
    # A document's last place predicts nothing, whatever its weight.
    expected = [([5, 6, 7, 8], [1, 0.5, 0, 0]), ([9, 10, 11], [0, 2, 0])]
    assert pieces(rows_of(config_of(tmp_path, records, weighted, parquet=parquet, **more))) == expected
    shifted = PrebuiltLmDatasetFormat(loss_weights_key="w", loss_weight_transform="shift_left")
    config = config_of(tmp_path, records, shifted, parquet=parquet, cache_dir=str(tmp_path / "other"))
    assert pieces(rows_of(config)) == [([5, 6, 7, 8], [0.5, 0, 1, 0]), ([9, 10, 11], [2, 1, 0])]


@pytest.mark.parametrize("separate_with", [None, " => ", 77])
@pytest.mark.parametrize("mask_inputs", [True, False])
def test_supervised(tmp_path, separate_with, mask_inputs):
    records = [{"input": "the x", "target": "yé"}, {"input": "q", "target": "longer answer"}]
    format = SupervisedLmDatasetFormat(separate_with=separate_with, mask_inputs=mask_inputs)
    found = pieces(rows_of(config_of(tmp_path, records, format)))

    def ids(text):
        return TOKENIZER.encode_with_offsets(text)[0].tolist()

    expected = []
    for record in records:
        between = separate_with if isinstance(separate_with, str) else ""
        prompt = [BOS, *ids(record["input"] + between), *([77] if separate_with == 77 else [])]
        target = [*ids(record["target"]), EOS]
        # The prompt's last token predicts the target's first, the target's last but one predicts EOS.
        weights = [0.0 if mask_inputs else 1.0] * (len(prompt) - 1) + [1.0] * len(target) + [0.0]
        expected.append((prompt + target, weights))
    assert found == sorted(expected)
    alone = config_of(tmp_path, records, format, pack=False)
    assert rows_of(alone).segment_ids.max() == 0


@pytest.mark.parametrize("mask", [True, False])
def test_chat_against_transformers(tmp_path, mask):
    records = [
        {"messages": CONVERSATION, "chat_template_kwargs": {"style": "é"}},
        {"messages": CONVERSATION[1:3], "system": "be kind"},
        {"messages": CONVERSATION[1:]},
    ]
    format = ChatLmDatasetFormat(mask_user_turns=mask, system_prompt="system", pack=1, allow_unstopped=True)
    config = config_of(tmp_path, records, format, chat_template=TEMPLATE)
    found = pieces(rows_of(config, positions=200))
    expected = []
    for record in records:
        messages = record["messages"]
        if "system" in record:
            messages = [{"role": "system", "content": record["system"]}, *messages]
        (text,), (spans,) = render_jinja_template(
            [messages],
            chat_template=TEMPLATE,
            return_assistant_tokens_mask=True,
            **record.get("chat_template_kwargs", {}),
        )
        assert spans
        ids, offsets = TOKENIZER.encode_with_offsets(text)
        target = np.array([any(a <= start < b for a, b in spans) for start, _ in offsets])
        weights = [float(x) for x in target[1:]] if mask else [1.0] * (len(ids) - 1)
        expected.append((ids.tolist(), [*weights, 0.0]))
    assert found == sorted(expected)


def test_templates_that_cannot_be_used(tmp_path):
    records = [{"messages": CONVERSATION}]
    for format, expected in (
        (ChatLmDatasetFormat(turns="last", mask_user_turns=False), "turns: last has no effect"),
        (ChatLmDatasetFormat(chat_template="{% if %}", mask_user_turns=False), "not a Jinja template"),
        (ChatLmDatasetFormat(chat_template=TEMPLATE, single_turn=True), "single_turn: true is for prepared prompts"),
        (PrebuiltLmDatasetFormat(loss_weight_transform="double"), "`shift_left` or null, got 'double'"),
        (PrebuiltLmDatasetFormat(loss_weight_transform="shift_left"), "needs loss_weights_key"),
    ):
        with pytest.raises(DataError, match=expected):
            resolve_training(config_of(tmp_path, records, format))
    bad = config_of(
        tmp_path, [{"messages": [{"role": "tool", "content": "x"}] * 2}], ChatLmDatasetFormat(chat_template=TEMPLATE)
    )
    said = r"x\.jsonl:1: the chat template refuses these messages at its line \d+ \(unknown role tool\)"
    with pytest.raises(DataError, match=said):
        rows_of(replace_format(bad, mask_user_turns=False))
    with pytest.raises(DataError, match="data set 'x': chat_template: is missing, and the tokenizer small has none"):
        rows_of(config_of(tmp_path, records, ChatLmDatasetFormat()))


def test_templates_run_in_a_sandbox():
    template = ChatTemplate(text="{{ messages.__class__.__mro__ }}", tokens={"bos_token": "", "eos_token": ""})
    with pytest.raises(DataError, match="refuses"):
        template.render([], {}, "here")
    assert ChatTemplate(
        text="{{ bos_token }}x{{ eos_token }}", tokens={"bos_token": "<s>", "eos_token": "</s>"}
    ).render([], {}, "here") == ("<s>x</s>", [])


@pytest.mark.parametrize(
    ("record", "format", "message"),
    [
        ({"ids": [1]}, PrebuiltLmDatasetFormat(), "no key 'input_ids'; it has 'ids'"),
        ({"input_ids": "12"}, PrebuiltLmDatasetFormat(), "'input_ids' is str, expected a list"),
        ({"input_ids": [1, "x"]}, PrebuiltLmDatasetFormat(), "must be a list of whole numbers"),
        ({"input_ids": [1.5]}, PrebuiltLmDatasetFormat(), "must be a list of whole numbers"),
        ({"input_ids": [[1], [2, 3]]}, PrebuiltLmDatasetFormat(), "'input_ids' must be a list of whole numbers"),
        ({"input_ids": [1, 2**70]}, PrebuiltLmDatasetFormat(), "'input_ids' must be a list of whole numbers"),
        ({"input_ids": [1, 999]}, PrebuiltLmDatasetFormat(), "token id 999 is outside the model's vocabulary of 264"),
        ({"input_ids": [1, 2], "w": [1]}, PrebuiltLmDatasetFormat(loss_weights_key="w"), "1 w for 2 input_ids"),
        ({"input": "x"}, SupervisedLmDatasetFormat(), "no key 'target'"),
        ([1], SupervisedLmDatasetFormat(), "expected an object with the key 'input', found list"),
    ],
)
def test_records_that_cannot_be_used(tmp_path, record, format, message):
    with pytest.raises(DataError, match=message) as info:
        rows_of(config_of(tmp_path, [record], format))
    assert "x.jsonl:1: " in str(info.value)
