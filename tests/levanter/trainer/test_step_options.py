"""What a train step can do beside: leave itself out, z-loss, norms and histograms of what it has in its hands."""

import dataclasses
from functools import cache

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, leaf_from_source, mappings_for, named_arrays, random_arrays, tiny_config
from helpers.torch_llama import random_tensors, torch_llama
from helpers.train_steps import POSITIONS, ROWS, SEGMENTS, TOKENS, WEIGHTS, Setup, mesh_setup, on_host
from jax.sharding import NamedSharding, PartitionSpec

from haliax_ext.abstract import abstract, leaves, with_arrays
from haliax_ext.meshspec import MeshSpec
from levanter.models.scoring import next_tokens, token_scores
from levanter.optim import AdamConfig, SgdConfig, SkipStepConfig
from levanter.optim.skip_steps import Recent, is_outlier, remembered
from levanter.trainer.loss import LmObjective
from levanter.trainer.watch import BINS, Watch, tracker_metrics

WATCH = Watch(targets=("grads", "params", "updates", "opt_state"), norms=True, histograms=False, split=True, every=1)
# No history is enough for an outlier before step 2; from then on, a loss above the mean is one.
SKIPS = AdamConfig(
    learning_rate=3e-3, warmup=2, skip_bad_steps=SkipStepConfig(rolling_interval_length=4, sigma_factor=0.01)
)
EVERYTHING = mesh_setup(
    4,
    2,
    optimizer=SKIPS,
    more=(("skip_nonfinite", True), ("outliers", SKIPS.outliers), ("watch", WATCH)),
    objective=LmObjective(chunk=12, z_loss_weight=0.01),
)


@cache
def everything(devices):
    """The compiled step, once for all tests."""
    mesh = EVERYTHING.spec.build(devices)
    _, _, program = EVERYTHING.programs()
    return mesh, program.jit(mesh)


def spoiled(batch, value):
    """The batch with one weight that is no number."""
    weights = batch.loss_weights.array.at[3, 5].set(value)
    return dataclasses.replace(batch, loss_weights=hax.named(weights, batch.loss_weights.axes))


def run(devices, batches):
    """The metrics of each step, and the last state by path."""
    mesh, step = everything(tuple(devices))
    state, history = EVERYTHING.start(mesh), []
    for batch in batches:
        state, metrics = step(state, None, batch)
        history.append(jax.device_get(metrics))
    return history, on_host(state)


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_a_step_that_is_left_out_is_as_if_its_batch_had_not_been(value, devices):
    mesh, _ = everything(tuple(devices))
    first, second = EVERYTHING.batch(0, mesh), EVERYTHING.batch(0, mesh)
    with_it, found = run(devices, [first, spoiled(EVERYTHING.batch(1, mesh), value), second])
    without, expected = run(devices, [first, second])
    assert [float(m.skipped) for m in with_it] == [0, 1, 0] and [float(m.skipped) for m in without] == [0, 0]
    assert not np.isfinite(with_it[1].loss) and with_it[1].update_norm == 0
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    # The schedule too: its second step, not its third.
    assert with_it[2].learning_rate == without[1].learning_rate != with_it[0].learning_rate
    assert with_it[2].loss == without[1].loss


def test_a_step_far_from_those_before_is_left_out(devices):
    mesh, _ = everything(tuple(devices))
    same, other = EVERYTHING.batch(0, mesh), EVERYTHING.batch(2, mesh)
    history, found = run(devices, [same, same, same, same, other])
    losses = [float(m.loss) for m in history]
    # A batch that is learned has ever smaller losses; another one's is larger.
    assert losses[4] > max(losses[2:4])
    assert [float(m.skipped) for m in history] == [0, 0, 0, 0, 1]
    _, before = run(devices, [same] * 4)
    recent = [path for path in found if path.rpartition(".")[2] in ("losses", "grad_norms", "seen")]
    assert len(recent) == 3
    for path, value in before.items():
        same_now = np.array_equal(found[path], value)
        assert same_now == (path not in recent), path
    # What is remembered is remembered of the step that was left out, too: a new level is not refused for ever.
    assert found[next(p for p in recent if p.endswith("seen"))] == 5


def test_outliers_against_numpy():
    rng = np.random.default_rng(1)
    rule = SkipStepConfig(rolling_interval_length=6, sigma_factor=1.5)
    recent = Recent(jnp.zeros(6, jnp.float32), jnp.zeros(6, jnp.float32), jnp.int32(0))
    losses, norms, found = [], [], []
    ask = jax.jit(lambda r, x, n: (is_outlier(rule, r, x, n), remembered(r, x, n)))
    for step in range(40):
        loss, norm = (rng.normal(3, 1, 2) + (step % 7 == 0) * 3).astype(np.float32)
        if step == 20:
            loss = np.float32(np.nan)
        if len(losses) < 3:
            expected = False
        else:
            known = [np.asarray(values[-6:], np.float64) for values in (losses, norms)]
            limits = [values.mean() + 1.5 * values.std() for values in known]
            expected = not (loss <= limits[0] and norm <= limits[1])
        answer, recent = ask(recent, loss, norm)
        assert bool(answer) == expected, step
        found.append(expected)
        if np.isfinite(loss):
            losses.append(loss)
            norms.append(norm)
    assert 3 < sum(found) < 30 and found[20]


def test_what_is_watched_equals_the_arrays(devices):
    mesh, _ = everything(tuple(devices))
    history, found = run(devices, [EVERYTHING.batch(0, mesh)])
    template = EVERYTHING.programs()[2].inputs[0].value
    names = WATCH.names(
        grads=template.model, params=template.model, updates=template.model, opt_state=template.optimizer
    )
    seen = tracker_metrics(history[0].watched, names)
    start = random_arrays(EVERYTHING.config)
    up = "transformer.layers.{}.mlp.up_proj.weight"
    stacked = "transformer.layers.stacked.mlp.up_proj.weight"
    for n in range(2):
        axis = next(leaf for leaf in leaves(template.model) if leaf.path == stacked).names.index("layers")
        before = np.take(start[stacked], n, axis)
        assert seen[f"params/norm/{up.format(n)}"] == pytest.approx(np.linalg.norm(before), rel=1e-5)
        # Adam's first moment after one step is a tenth of the gradient, clipped at 1 over all.
        (moment,) = [path for path in found if path.endswith(f".mu.{stacked}")]
        clip = min(1.0, 1 / float(history[0].grad_norm))
        gradient = np.take(found[moment], n, axis) / 0.1 / clip
        assert seen[f"grad/norm/{up.format(n)}"] == pytest.approx(np.linalg.norm(gradient), rel=1e-4)
    assert seen["params/norm/lm_head.weight"] == pytest.approx(np.linalg.norm(start["lm_head.weight"]), rel=1e-5)
    assert seen["opt_state/norm/1.nu.lm_head.weight"] == 0
    squares = sum(v**2 for k, v in seen.items() if k.startswith("grad/norm/"))
    assert np.sqrt(squares) == pytest.approx(float(history[0].grad_norm), rel=1e-5)
    assert seen[f"updates/norm/{up.format(0)}"] == 0  # The schedule begins at 0.


def test_histograms_equal_numpys(devices):
    Layers, Embed, Mlp = hax.Axis("layers", 3), hax.Axis("embed", 64), hax.Axis("mlp", 96)
    rng = np.random.default_rng(0)
    values = rng.standard_t(3, (Mlp.size, Layers.size, Embed.size)).astype(np.float32)
    tree = {"up": hax.named(values, (Mlp, Layers, Embed)), "norm": hax.named(values[0, 0], Embed)}
    watch = dataclasses.replace(WATCH, targets=("params",), histograms=True)
    mesh = jax.sharding.Mesh(np.asarray(devices).reshape(4, 2), ("data", "model"))
    cut = NamedSharding(mesh, PartitionSpec("model", None, "data"))
    placed = {**tree, "up": hax.NamedArray(jax.device_put(values, cut), tree["up"].axes)}
    seen = tracker_metrics(
        jax.device_get(jax.jit(lambda params: watch.see(params=params))(placed)), watch.names(params=tree)
    )
    expected = {f"up.{n}": values[:, n] for n in range(3)} | {"norm": values[0, 0]}
    for name, array in expected.items():
        assert seen[f"params/norm/{name}"] == pytest.approx(np.linalg.norm(array), rel=1e-5)
        hist = seen[f"params/hist/{name}"]
        counts, edges = np.histogram(array, bins=BINS)
        np.testing.assert_allclose(hist["edges"], edges, rtol=1e-4, atol=1e-6)
        assert sum(hist["counts"]) == array.size
        # A value within rounding of an edge may fall on either side.
        assert np.abs(np.asarray(hist["counts"]) - counts).max() <= 2


def plain_loss(tensors, config, *, weight):
    """Mean −log p and mean squared log-normalizer by torch, with the gradient of `loss + weight × z` by path."""
    torch = pytest.importorskip("torch")
    model = torch_llama(config, tensors)
    tokens = torch.from_numpy(TOKENS[0]).long()
    logits = model(tokens).logits[:, :-1].reshape(-1, VOCAB)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
    z = torch.logsumexp(logits, -1).square().mean()
    (loss + weight * z).backward()
    return loss.item(), z.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("data", "model", "per_device"),
    [(1, 8, -1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 4, 4), (1, 1, -1)))],
)
def test_z_loss_and_its_gradient_equal_torch_however_the_vocabulary_is_cut(data, model, per_device, devices):
    config, weight = tiny_config(num_kv_heads=8), 0.02
    rules, template = config.weight_rules(), EVERYTHING.programs()[2].inputs[0].value.model
    theirs = random_tensors(config)
    loss, z, gradient = plain_loss(theirs, config, weight=weight)
    spec = MeshSpec.of(data=data, model=model)
    setup = Setup(
        spec,
        mappings_for(config, spec),
        per_device=per_device,
        packed=False,
        optimizer=SgdConfig(learning_rate=1.0, weight_decay=0.0, max_grad_norm=None, warmup=0, lr_schedule="constant"),
        objective=LmObjective(chunk=12, z_loss_weight=weight),
    )
    arrays = named_arrays(config, theirs)
    history, found = setup.run(devices, arrays=arrays, steps=1)
    assert history[0]["loss"] == pytest.approx(loss, rel=1e-5)
    assert history[0]["z_loss"] == pytest.approx(weight * z, rel=1e-5)
    assert weight * z > 0.05 * loss
    for leaf in leaves(template):
        moved = arrays[leaf.path] - found[f"model.{leaf.path}"]
        want = leaf_from_source(leaf, rules, gradient)
        np.testing.assert_allclose(moved, want, atol=3e-6, rtol=1e-3, err_msg=leaf.path)


def test_log_normalizers_leave_out_what_only_rounds_the_vocabulary_up():
    config = tiny_config(vocab_size=250)
    template = abstract(lambda: config.build(hax.Axis("vocab", VOCAB), key=jax.random.PRNGKey(0)))
    model = with_arrays(template, {k: jnp.asarray(v) for k, v in random_arrays(config).items()})
    axes = (hax.Axis("batch", 2), hax.Axis("position", 20))
    tokens = hax.named(jnp.asarray(TOKENS[0][:2, :20] % 250), axes)
    segments = hax.named(jnp.asarray(SEGMENTS[0][:2, :20]), axes)

    @jax.jit
    def both(model):
        hidden = model(tokens, segment_ids=segments).activations.rearrange(("batch", "position", "embed"))
        return hidden.array, token_scores(model, tokens, next_tokens(tokens, segments), segment_ids=segments, chunk=6)

    hidden, (logprobs, normalizers) = both(model)
    hidden = np.asarray(hidden, np.float64)
    logits = hidden @ np.asarray(model.lm_head.weight.array, np.float64)[:250].T
    want = np.log(np.exp(logits).sum(-1))
    follows = np.zeros((2, 20), bool)
    follows[:, :-1] = SEGMENTS[0][:2, :19] == SEGMENTS[0][:2, 1:20]
    np.testing.assert_allclose(normalizers.array, np.where(follows, want, 0), rtol=1e-5, atol=1e-6)
    picked = np.take_along_axis(logits, np.roll(np.asarray(tokens.array), -1, 1)[..., None], -1)[..., 0] - want
    np.testing.assert_allclose(logprobs.array, np.where(follows, picked, 0), rtol=1e-4, atol=1e-5)


def test_a_plain_step_has_no_more_outputs_than_it_had():
    _, _, program = mesh_setup(1, 1).programs()
    outputs = [leaf.leaf.path for leaf in program.out_placement.leaves if leaf.leaf.path.startswith("1.")]
    names = ("loss", "weight", "grad_norm", "update_norm", "parameter_norm", "learning_rate")
    assert outputs == [f"1.{name}" for name in names]
    assert WEIGHTS.shape == (3, ROWS, POSITIONS)
