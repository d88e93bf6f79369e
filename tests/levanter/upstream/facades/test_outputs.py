"""A model's outputs act as the logits that upstream's calls returned."""

import haliax as hax
import jax
import numpy as np
import pytest

from levanter.layers.attention import AttentionMask
from levanter.models import Gpt2Config

CONFIG = Gpt2Config(max_seq_len=8, hidden_dim=16, num_heads=2, num_layers=1)


@pytest.fixture(scope="module")
def model():
    return CONFIG.build(hax.Axis("vocab", 31), key=jax.random.key(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_outputs_have_the_members_and_operators_of_logits(model):
    ids = hax.arange(CONFIG.max_Pos)
    outputs = model(ids, attn_mask=AttentionMask.causal())
    logits = model.logits(outputs.activations)
    np.testing.assert_array_equal(outputs.array, logits.array)
    assert outputs.axis_size("vocab") == 31 and outputs.axes == logits.axes and outputs.dtype == logits.dtype
    np.testing.assert_array_equal((2 * outputs - 1)["vocab", 3].array, 2 * logits.array[:, 3] - 1)
    with pytest.raises(AttributeError, match="nonsense"):
        outputs.nonsense  # noqa: B018


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_outputs_leave_a_jitted_function_as_both(model):
    ids = hax.arange(CONFIG.max_Pos)
    outputs = hax.named_jit(lambda model, ids: model(ids, attn_mask=AttentionMask.causal()))(model, ids)
    expected = model(ids)
    np.testing.assert_allclose(outputs.array, expected.logits.array, atol=1e-5)
    np.testing.assert_allclose(outputs.activations.array, expected.activations.array, atol=1e-5)
