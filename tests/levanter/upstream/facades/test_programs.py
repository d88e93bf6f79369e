"""Losses, skipped steps, states, annotations and vocabularies with upstream's calls, against plain arithmetic."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from levanter.models import Gpt2Config
from levanter.models.base import LmHeadModel
from levanter.optim import SkipStepConfig
from levanter.trainer.loss import in_compute_dtype
from levanter.upstream.facades.layers import attention_config, build_rotary
from levanter.upstream.facades.lora import OldLoraConfig, lora_trainable_params_filter, loraize, merge_lora_modules
from levanter.upstream.facades.losses import (
    blockwise_cross_entropy_loss,
    cross_entropy_loss_and_log_normalizers,
    maybe_fused_next_token_loss,
)
from levanter.upstream.facades.model_members import resize_vocab
from levanter.upstream.facades.optimizers import EmaDecaySqrtModelAveraging, wrap
from levanter.upstream.facades.saved import load_checkpoint_or_initialize, save_checkpoint
from levanter.upstream.facades.trainer_state import TrainerState

Batch, Pos, Embed, Vocab = Axis("batch", 2), Axis("seq", 5), Axis("width", 8), Axis("label", 11)
CONFIG = Gpt2Config(max_seq_len=8, hidden_dim=16, num_heads=2, num_layers=2)


def drawn(*axes: Axis, seed: int) -> hax.NamedArray:
    return hax.random.normal(jax.random.key(seed), axes)


@pytest.fixture(scope="module")
def model():
    return CONFIG.build(Axis("vocab", 31), key=jax.random.key(0))


@pytest.mark.parametrize("cap", [None, 2.0])
def test_losses_are_those_of_plain_arithmetic(cap):
    x, head = drawn(Batch, Pos, Embed, seed=0), drawn(Embed, Vocab, seed=1)
    ids = hax.random.randint(jax.random.key(2), (Batch, Pos), 0, Vocab.size)
    logits = np.einsum("bse,ev->bsv", x.array, head.array)
    logits = logits if cap is None else np.tanh(logits / cap) * cap
    normalizers = np.log(np.exp(logits).sum(-1))
    losses = normalizers - np.take_along_axis(logits, np.asarray(ids.array)[..., None], -1)[..., 0]
    loss, norm = blockwise_cross_entropy_loss((x, head), Embed, Vocab, ids, 4, logit_soft_cap=cap)
    np.testing.assert_allclose(loss.array, losses, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm.array, normalizers, rtol=1e-5, atol=1e-5)
    one_hot = hax.nn.one_hot(ids, Vocab)
    full, _ = cross_entropy_loss_and_log_normalizers(hax.named(logits, (Batch, Pos, Vocab)), Vocab, one_hot)
    np.testing.assert_allclose(full.array, losses, rtol=1e-5, atol=1e-5)
    # Each position predicts the next token; the last one predicts none.
    following = np.asarray(ids.array)[:, 1:, None]
    expected = (normalizers[:, :-1] - np.take_along_axis(logits[:, :-1], following, -1)[..., 0]).mean()
    for block in (None, 3):
        mean = maybe_fused_next_token_loss(Pos, Embed, Vocab, x, head, ids, block_size=block, logit_soft_cap=cap)
        np.testing.assert_allclose(mean.array, expected, rtol=1e-5)


def test_a_wrapped_optimizer_leaves_outliers_out():
    optimizer = wrap(SkipStepConfig(rolling_interval_length=4))(optax.sgd(1.0))
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="Loss must be provided"):
        optimizer.update(params, state, params)
    for loss in (2.0, 2.1, 1.9):
        updates, state = optimizer.update(params, state, params, loss=loss)
        np.testing.assert_array_equal(updates["w"], -np.ones(3))
    updates, state = optimizer.update(params, state, params, loss=50.0)
    assert not np.any(updates["w"]) and int(state.count) == 4 and int(state.current_idx) == 0
    np.testing.assert_allclose(state.losses, [2.0, 2.1, 1.9, 50.0])


def test_a_state_trains_the_selected_part():
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = TrainerState.init(optax.sgd(0.5), model, key=jax.random.key(0), is_trainable={"a": True, "b": False})
    after, _ = state.take_step({"a": jnp.full(2, 2.0), "b": None})
    assert after.int_step == 1 and after.model["a"].tolist() == [0, 0] and after.model["b"].tolist() == [1, 1]
    average = EmaDecaySqrtModelAveraging({"p": jnp.zeros(1)}, beta=0.5, switch_step=9, decay_steps=4)
    average = average.update({"p": jnp.ones(1)}, 0).update({"p": jnp.full(1, 3.0)}, 1)
    assert average.model["p"].tolist() == [2.0] and float(average.tot_weight) == 1.0


def test_what_a_checkpoint_lacks_is_initialized(tmp_path):
    def init(key):
        return {"a": jax.random.normal(key, (3,)), "b": jnp.full(2, 7.0)}

    saved = {"a": jnp.arange(3.0)}
    load = load_checkpoint_or_initialize(init, str(tmp_path / "none"))
    np.testing.assert_array_equal(load(jax.random.key(1))["a"], init(jax.random.key(1))["a"])
    save_checkpoint(saved, 3, str(tmp_path / "step-3"))
    variants: list[dict[str, Any]] = [{"is_checkpointed": {"a": True, "b": False}}, {"allow_partial": True}]
    for keys in variants:
        loaded = load_checkpoint_or_initialize(init, str(tmp_path), **keys)(jax.random.key(1))
        assert loaded["a"].tolist() == [0, 1, 2] and loaded["b"].tolist() == [7, 7]
    with pytest.raises(FileNotFoundError):
        load_checkpoint_or_initialize(init, str(tmp_path / "none"), do_load=True)(jax.random.key(1))


def test_adapters_begin_as_the_base_and_merge_into_it(model):
    adapted = loraize(model, OldLoraConfig(r=2, target_modules=["c_attn", "c_fc"]), jax.random.key(1))
    ids = hax.arange(CONFIG.max_Pos)
    np.testing.assert_allclose(adapted(ids).logits.array, model(ids).logits.array, atol=1e-6)
    trained = eqx.filter(adapted, lora_trainable_params_filter(adapted))
    assert {x.shape for x in jax.tree.leaves(trained)} == {x.shape for x in jax.tree.leaves(adapted.adapters)}
    # Random, since the norm before a projection makes features that add up to 0.
    noise = jax.tree.map(lambda x: jax.random.normal(jax.random.key(5), x.shape), adapted.adapters)
    changed = eqx.tree_at(lambda m: m.adapters, adapted, noise)
    # A step casts a model by wrapping its layers: what is bound before stays bound.
    cast = in_compute_dtype(changed.bound, np.dtype(np.float32), None)
    np.testing.assert_allclose(cast(ids).logits.array, changed(ids).logits.array, atol=1e-4)
    merged = merge_lora_modules(changed)
    assert type(merged) is type(model)
    np.testing.assert_allclose(merged(ids).logits.array, changed(ids).logits.array, atol=1e-3)
    assert np.abs(merged(ids).logits.array - model(ids).logits.array).max() > 1e-2
    with pytest.raises(ValueError, match="has adapters already"):
        loraize(adapted, OldLoraConfig(), jax.random.key(1))
    with pytest.raises(ValueError, match=r"dropout 0\.1 is not applied"):
        loraize(model, OldLoraConfig(dropout=0.1), jax.random.key(1))


def test_a_vocabulary_grows_and_shrinks(model):
    grown, shrunk = resize_vocab(model)(40), resize_vocab(model)(20)
    ids = hax.arange(CONFIG.max_Pos)
    assert grown.Vocab.size == grown.config.vocab_size == 40 and shrunk.Vocab.size == 20
    for resized, size in ((grown, 31), (shrunk, 20)):
        np.testing.assert_allclose(resized(ids).logits.array[:, :size], model(ids).logits.array[:, :size], atol=1e-6)


def test_a_family_is_refused_with_ours_and_an_annotation_is_not():
    def train(model: "LmHeadModel[Gpt2Config]") -> None:  # pyright: ignore[reportInvalidTypeArguments]
        del model

    assert repr(LmHeadModel[Gpt2Config]) == "LmHeadModel[Gpt2Config]"  # pyright: ignore[reportInvalidTypeArguments]
    assert train is not None
    with pytest.raises(ValueError, match=r"LmHeadModel\[Gpt2Config\].*docs/porting-models.md"):
        exec("class Mine(LmHeadModel[Gpt2Config]): pass", {"LmHeadModel": LmHeadModel, "Gpt2Config": Gpt2Config})


def test_attention_and_rotary_configurations(model):
    del model
    config = attention_config(CONFIG)()
    assert (config.Heads.size, config.HeadSize.size, config.Embed.size) == (2, 8, 16)
    from levanter.layers.rotary import DefaultRotaryConfig

    HeadSize, Position = Axis("head_size", 4), Axis("position", 6)
    x = drawn(Position, HeadSize, seed=4)
    rotated = build_rotary(DefaultRotaryConfig(theta=100.0))(HeadSize)(x, hax.arange(Position))
    pairs = np.asarray(x.array[:, :2]) + 1j * np.asarray(x.array[:, 2:])
    turned = pairs * np.exp(1j * np.arange(6)[:, None] * np.array([1.0, 0.1]))
    np.testing.assert_allclose(rotated.array, np.concatenate([turned.real, turned.imag], 1), atol=1e-5)
