"""Documents of upstream's server, both generations, as today's class reads them."""

import pytest
import yaml

from levanter.commands.generate.sample_config import SampleLmConfig
from levanter.commands.generate.upstream_engine_config import DTYPES as GENERATING_DTYPES
from levanter.commands.generate.upstream_engine_config import MOST_STEPS as GENERATING_STEPS
from levanter.commands.serve.config import ServeConfig, ServerInferenceConfig
from levanter.config import ConfigError, parse_text
from levanter.config.loader import read_text
from levanter.config.upstream import old_keys
from levanter.config.upstream.serving import DTYPES, MOST_STEPS
from levanter.inference.requests import SamplingParams

pytestmark = pytest.mark.quick

JUNE_2026 = """\
tokenizer: org/tokenizer
trainer: {mp: bf16}
service: {max_seq_len: 4096, max_seqs: 64, max_rounds: 32, compute_dtype: bf16, hbm_utilization: 0.8, max_pages: 512,
          page_size: 16, max_stop_seqs: 4, max_stop_tokens: 16, seed: 0, max_queued_tokens: 512, max_seqs_in_prefill: 8,
          max_prefill_size: 1024, max_tokens_per_round: null}
temperature: 0.5
seed: 7
host: localhost
port: 0
"""
OF_2025 = """\
checkpoint_path: runs/mine
hf_checkpoint: null
model: {type: llama, seq_len: 512}
tokenizer: org/tokenizer
trainer: {model_axis_size: 1}
service: {max_pages_per_seq: 32, page_size: 64, max_seqs: 16, max_rounds: 8, enable_logprobs: true}
host: localhost
port: 10243
"""


def read(text: str):
    """What is read of a document that does not name its model: a script passed it."""
    return read_text(ServeConfig, text if "checkpoint" in text else f"hf_checkpoint: x\n{text}")


def test_june_2026():
    config = read(JUNE_2026).config
    assert config.inference == ServerInferenceConfig(
        max_rows=64,
        max_seq_len=4096,
        prefill_chunk=1024,
        steps=8,
        cache_dtype="bfloat16",
        allocation="paged",
        page_size=16,
        pages=512,
    )
    assert config.sampling == SamplingParams(temperature=0.5, seed=7)
    assert (config.max_queued_tokens, config.host, config.port) == (512, "localhost", 0)
    assert config.tokenizer == "org/tokenizer"


def test_2025():
    loaded = read(OF_2025)
    config = loaded.config
    assert config.inference == ServerInferenceConfig(max_rows=16, max_seq_len=2048, steps=8, page_size=64)
    assert (config.checkpoint_path, config.hf_checkpoint, config.port) == ("runs/mine", None, 10243)
    said = [str(change) for change in loaded.changes]
    assert any("service.max_pages_per_seq: 32 → inference.max_seq_len: 2048" in line for line in said)
    assert any("service.enable_logprobs is ignored: log-probabilities are requested per request" in x for x in said)


def test_every_key_leaves_a_word_behind():
    loaded = read(JUNE_2026)
    keys = {change.key for change in loaded.changes}
    of_service = yaml.safe_load(JUNE_2026)["service"]
    ours = {"temperature", "seed", *(f"service.{key}" for key in of_service)}
    assert ours <= keys


def test_a_service_that_says_nothing():
    assert read("service: {}").config == ServeConfig(hf_checkpoint="x")
    assert read("service: {max_pages: null, max_prefill_size: null}").config == ServeConfig(hf_checkpoint="x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("service: {max_sequences: 4}", "unknown key"),
        ("service: {max_seqs: 0}", "max_rows"),
        ("service: {max_seqs: many}", "max_rows"),
        ("service: {max_pages_per_seq: many}", "expected an integer"),
        ("service: {max_seqs: 8}\ninference: {max_rows: 16}", "contradicts"),
        ("temperature: 0.5\nsampling: {temperature: 0.7}", "contradicts"),
        ("temperature: -1", "temperature"),
        ("service: {compute_dtype: fp4}", "cache_dtype"),
        ("service: 5", "service"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(text, said):
    with pytest.raises(ConfigError, match=said):
        read(text)


def test_nothing_waits_for_a_batch():
    (row,) = read("batch_timeout: 0.1").written.not_carried
    assert row.refused and row.key == "batch_timeout"
    assert read("batch_timeout: 0").written.not_carried == ()


def test_other_documents_keep_their_keys_of_these_names():
    config = parse_text(SampleLmConfig, "hf_checkpoint: x\ntemperature: 0.5\nseed: 3")
    assert (config.temperature, config.seed) == (0.5, 3)
    assert "temperature" not in old_keys(()) and "seed" not in old_keys(())


def test_the_same_words_mean_the_same_elsewhere():
    assert DTYPES == GENERATING_DTYPES and MOST_STEPS == GENERATING_STEPS
