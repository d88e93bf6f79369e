"""The table of well-known checkpoints: parameters as their publishers count them, and what has no entry.

The numbers are those of the safetensors files on the Hub (of tied heads, the table once). They are independent of the
table: one wrong size changes them.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportArgumentType=false

import haliax as hax
import jax
import numpy as np
import pytest
import transformers

from haliax_ext.abstract import abstract, leaves
from levanter.compat.hf.config_bridge import read_config
from levanter.compat.hf.known_configs import known_config
from levanter.models.vocabularies import known_vocabulary

pytestmark = pytest.mark.quick

PARAMETERS = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-pt": 999_885_952,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "openai-community/gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_published(name: str):
    document = known_config(name)
    assert document is not None
    bridged = read_config(dict(document))
    assert list(bridged.findings) == []
    Vocab = hax.Axis("vocab", bridged.config.vocab_size)
    model = abstract(lambda: bridged.config.build(Vocab, key=jax.random.PRNGKey(0)))
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves(model)) == PARAMETERS[name]
    # Each key is one that transformers knows for that model type, too.
    theirs = transformers.AutoConfig.for_model(**document)
    assert theirs.vocab_size == bridged.config.vocab_size


def test_names_of_the_hub_alone_have_an_entry(tmp_path, monkeypatch):
    expected = known_config("Qwen/Qwen2.5-7B")
    assert known_config("qwen/qwen2.5-7b@main") == expected
    assert known_config("Qwen/Qwen2.5-7B-Instruct")["max_position_embeddings"] == 32_768
    for other in ("Qwen/Qwen2.5-7B-GPTQ-Int4", "me/Qwen2.5-7B", "hf://Qwen/Qwen2.5-7B", "./Qwen/Qwen2.5-7B"):
        assert known_config(other) is None, other
    assert known_config("./nothing | Qwen/Qwen2.5-7B | pypi:a==1/b.gguf") == expected
    # A folder of that name is what is read.
    (tmp_path / "Qwen" / "Qwen2.5-7B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert known_config("Qwen/Qwen2.5-7B") is None


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("allenai/OLMo-1B", 50_280),
        ("allenai/OLMo-2-1124-7B-SFT", 100_278),
        ("allenai/Olmo-3-1025-7B", 100_278),
        ("Qwen/Qwen2-7B", 151_646),
        ("Qwen/Qwen2.5-7B-Instruct", 151_665),
        ("Qwen/Qwen3-8B", 151_669),
        ("google/gemma-2b", 256_000),
        ("google/gemma-2-9b-it", 256_000),
        ("google/gemma-3-4b-it", 262_145),
        ("mistralai/Mistral-7B-v0.1", 32_000),
        ("mistralai/Mistral-7B-Instruct-v0.3", 32_768),
        ("microsoft/phi-2", 50_295),
        ("microsoft/Phi-3-mini-4k-instruct", 32_011),
        ("microsoft/phi-4", 100_352),
        ("someone/else", None),
    ],
)
def test_vocabularies(name: str, ids: int | None):
    assert known_vocabulary(name) == ids
