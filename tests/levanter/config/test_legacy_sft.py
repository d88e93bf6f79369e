"""Documents of upstream's `sft` and `sft_mixture`, as `train_lm`'s configuration."""

import pytest

from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.lm.sft_config import SftConfig, SftMixtureConfig
from levanter.config import ConfigError, parse_text
from levanter.config.loader import read_text
from levanter.config.upstream.sft import MODEL_NAME, PAIR
from levanter.data.formats import ChatLmDatasetFormat, SupervisedLmDatasetFormat
from levanter.data.sources import HfDatasetSource, UrlDatasetSource

pytestmark = pytest.mark.quick

SFT = """\
model: {type: llama, seq_len: 64}
supervised_data: {cache_dir: gs://tokens/sft}
chat_train_urls: [a.jsonl, b.jsonl]
messages_field: turns
input_role: human
output_role: gpt
initialize_from_hf: true
model_name_or_path: org/model
tokenizer: org/tokenizer
max_seq_len: 512
epoch: 2
hf_save_steps: 0
"""
MIXTURE = """\
supervised_data:
  a: {train_urls: [a.jsonl], cache_dir: gs://tokens/a}
  b: {train_urls: [b.jsonl], validation_urls: [c.jsonl]}
mixture_weights: {a: 2, b: 1}
mixture_block_size: 64
stop_strategy: all_exhausted
initialize_from_hf: org/model
"""
HUB = """\
dataset_type: huggingface
supervised_data: {id: org/data, name: part, splits: [train], input_field: question, output_field: answer}
trainer: {initialize_from: gs://checkpoints/x}
"""
TWO_OF_THE_HUB = "dataset_type: huggingface\nsupervised_data: {a: {id: org/a}, b: {id: org/b}}\n"


def test_sft():
    loaded = read_text(SftConfig, SFT)
    config = loaded.config
    assert (config.initialize_from_hf, config.use_hf_model_config) == ("org/model", True)
    assert (config.train_seq_len, config.epoch, config.data.tokenizer) == (512, 2, "org/tokenizer")
    assert config.data.shuffle is True and list(config.data.components) == ["chat"]
    one = config.data.components["chat"]
    assert isinstance(one.source, UrlDatasetSource) and one.source.train_urls == ["a.jsonl", "b.jsonl"]
    assert (one.cache_dir, one.pack) == ("gs://tokens/sft", 4)
    assert one.format == ChatLmDatasetFormat(
        messages_field="turns", roles={"human": "user", "gpt": "assistant"}, chat_template=PAIR
    )
    said = [str(change) for change in loaded.changes]
    for key in ("chat_train_urls", "messages_field", "input_role", "output_role", "initialize_from_hf", "tokenizer"):
        assert any(f"{key}: " in line for line in said), key
    assert any("hf_save_steps is ignored" in line for line in said)


def test_a_mixture_and_the_defaults():
    loaded = read_text(SftMixtureConfig, MIXTURE)
    data = loaded.config.data
    assert data.train_weights == {"a": 2, "b": 1}
    assert (data.mixture_block_size, data.stop_strategy, data.tokenizer) == (64, "all_exhausted", MODEL_NAME)
    assert loaded.config.train_seq_len == 2048 and loaded.config.initialize_from_hf == "org/model"
    assert [each.format for each in data.components.values()] == [ChatLmDatasetFormat(chat_template=PAIR)] * 2
    assert data.components["b"].source.validation_urls == ["c.jsonl"]
    said = "\n".join(map(str, loaded.changes))
    assert f"tokenizer: (absent, {MODEL_NAME}) → data.tokenizer" in said
    assert "max_seq_len: (absent, 2048) → train_seq_len: 2048" in said


def test_pairs_of_the_hub():
    one = parse_text(SftConfig, HUB).data.components["chat"]
    assert one.source == HfDatasetSource(id="org/data", name="part", splits=["train"])
    assert one.format == SupervisedLmDatasetFormat(input_key="question", target_key="answer")


def test_todays_documents_are_train_lms():
    """The doors read them, too; and to `train_lm` itself these keys are none of its own."""
    text = "data: {tokenizer: org/tokenizer, components: {a: {source: {train_urls: [a.jsonl]}}}}\ntrain_seq_len: 64\n"
    assert parse_text(SftConfig, text).data == parse_text(TrainLmConfig, text).data
    with pytest.raises(ConfigError, match="chat_train_urls: unknown key"):
        parse_text(TrainLmConfig, SFT.replace("supervised_data: {cache_dir: gs://tokens/sft}\n", ""))


@pytest.mark.parametrize(
    ("cls", "text", "expected"),
    [
        (
            SftConfig,
            HUB.replace("huggingface", "parquet"),
            "dataset_type: expected chat_jsonl or huggingface, got parquet",
        ),
        (
            SftConfig,
            HUB.replace("{id", "{a: {id: x}, b: {id").replace("answer}", "answer}}"),
            "trained on the first of a, b",
        ),
        (SftConfig, SFT.replace("{cache_dir", "{cash_dir"), r"supervised_data\.cash_dir: expected a source"),
        (SftMixtureConfig, "supervised_data: {a: 5}\n", r"supervised_data\.a: expected a source, got 5"),
        (SftMixtureConfig, "supervised_data: 5\n", "supervised_data: expected a source, or sources by name, got 5"),
        (SftMixtureConfig, MIXTURE + "input_role: [a]\n", r"input_role: expected text, got \[a\]"),
    ],
)
def test_what_cannot_be_translated(cls, text, expected):
    with pytest.raises(ConfigError, match=expected):
        parse_text(cls, text)
