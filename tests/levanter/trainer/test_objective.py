"""An objective that is not language modeling: preferences between pairs of texts.

Its batch has other arrays, it calls the model twice, its normalizer counts pairs and not tokens, and of its terms one
adds to the loss with a weight and one is only shown. It goes through the step, the loop and the trackers as they are.
The judge is torch, of the mathematics written anew and of its gradient.
"""

import dataclasses
from functools import cache

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, leaf_from_source, mappings_for, named_arrays, tiny_config
from helpers.torch_llama import random_tensors, torch_llama
from helpers.train_steps import POSITIONS, ROWS, Setup
from jax.sharding import NamedSharding

from haliax_ext.meshspec import MeshSpec
from levanter.layers.outputs import Sums
from levanter.models.base import LmHeadModel
from levanter.models.scoring import next_tokens, token_logprobs
from levanter.optim import SgdConfig
from levanter.trainer.loop import Loop
from levanter.trainer.metrics import StepSize, Track
from levanter.trainer.objective import LOSS, AtStep, Objective, Term

CONFIG = tiny_config(num_kv_heads=8)
RNG = np.random.default_rng(11)
CHOSEN = RNG.integers(0, VOCAB, (2, ROWS, POSITIONS)).astype(np.int32)
REJECTED = RNG.integers(0, VOCAB, (2, ROWS, POSITIONS)).astype(np.int32)
COUNTED = (np.arange(POSITIONS - 1) >= RNG.integers(2, 20, (2, 2, ROWS, 1))).astype(np.float32)
"""Which of both texts' next tokens count: `[step, text, row, position - 1]`."""
REFERENCE = RNG.normal(size=(2, ROWS)).astype(np.float32)
IS_PAIR = (np.arange(ROWS) < [[13], [16]]).astype(np.float32)
BETA, WEIGHT = 0.1, 0.05
START = AtStep(step=jnp.int32(0))


class Pairs(eqx.Module):
    """Two texts a row, of which the first is preferred.

    Attributes:
        chosen, rejected: ids, `[batch, position]`.
        counts: float32 `[batch, text, position]`, which predictions count.
        reference: float32 `[batch]`, how much more likely a reference model finds the first one.
        is_pair: float32 `[batch]`, 0 for rows that only fill the batch.
    """

    chosen: hax.NamedArray
    rejected: hax.NamedArray
    counts: hax.NamedArray
    reference: hax.NamedArray
    is_pair: hax.NamedArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preference(Objective[LmHeadModel, Pairs]):
    """−log σ(β · (log-ratio − the reference's)), with a little of the chosen texts' own loss."""

    @property
    def terms(self):
        return (Term(name=LOSS), Term(name="chosen_loss", weight=WEIGHT), Term(name="accuracy", weight=None))

    def abstract_batch(self, Batch, Pos):
        def of(dtype, *axes):
            return hax.NamedArray(jax.ShapeDtypeStruct(tuple(a.size for a in axes), dtype), axes)  # pyright: ignore

        ids, number = np.dtype(np.int32), np.dtype(np.float32)
        return Pairs(
            chosen=of(ids, Batch, Pos),
            rejected=of(ids, Batch, Pos),
            counts=of(number, Batch, hax.Axis("text", 2), Pos),
            reference=of(number, Batch),
            is_pair=of(number, Batch),
        )

    def rows(self, batch):
        return batch.is_pair.axes[0]

    def normalizer(self, batch):
        return hax.sum(batch.is_pair).scalar()

    def sums(self, model, batch, at):
        texts = (batch.chosen, batch.rejected)
        chosen, rejected = (
            hax.sum(token_logprobs(model, tokens, next_tokens(tokens), chunk=12) * batch.counts["text", n], "position")
            for n, tokens in enumerate(texts)
        )
        x = BETA * (chosen - rejected - batch.reference)
        each = {
            LOSS: hax.named(jax.nn.softplus(-x.array), x.axes),
            "chosen_loss": -chosen,
            "accuracy": (x > 0).astype(jnp.float32),
        }
        return Sums({name: hax.sum(value * batch.is_pair).scalar() for name, value in each.items()})


@dataclasses.dataclass(frozen=True)
class PairSetup(Setup):
    """A run of a few steps over pairs."""

    def batch(self, n, mesh):
        template = self.objective.abstract_batch(hax.Axis("batch", ROWS), hax.Axis("position", POSITIONS))
        counts = np.pad(COUNTED[n].swapaxes(0, 1), ((0, 0), (0, 0), (0, 1)))
        values = Pairs(CHOSEN[n], REJECTED[n], counts, REFERENCE[n], IS_PAIR[n])  # pyright: ignore

        def placed(declared, value):
            spec = self.mappings.compute.spec(axis.name for axis in declared.axes)
            return hax.NamedArray(jax.device_put(value, NamedSharding(mesh, spec)), declared.axes)

        return jax.tree.map(placed, template, values, is_leaf=lambda x: isinstance(x, hax.NamedArray))


def pair_setup(data, model, per_device=-1):
    spec = MeshSpec.of(data=data, model=model)
    return PairSetup(
        spec,
        mappings_for(CONFIG, spec),
        per_device=per_device,
        optimizer=SgdConfig(learning_rate=1.0, weight_decay=0.0, max_grad_norm=None, warmup=0, lr_schedule="constant"),
        config=CONFIG,
        objective=Preference(),
    )


@cache
def torchs():
    """Tensors; by torch on the first batch: every term, and the gradient of what is minimized, by name."""
    torch = pytest.importorskip("torch")
    tensors = random_tensors(CONFIG)
    model, real = torch_llama(CONFIG, tensors), int(IS_PAIR[0].sum())

    def logprob(tokens, counts):
        ids = torch.from_numpy(tokens[:real]).long()
        scores = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        return (scores * torch.from_numpy(counts[:real])).sum(-1)

    chosen, rejected = logprob(CHOSEN[0], COUNTED[0, 0]), logprob(REJECTED[0], COUNTED[0, 1])
    x = BETA * (chosen - rejected - torch.from_numpy(REFERENCE[0, :real]))
    terms = {
        LOSS: -torch.nn.functional.logsigmoid(x).mean(),
        "chosen_loss": -WEIGHT * chosen.mean(),
        "accuracy": (x > 0).float().mean(),
    }
    (terms[LOSS] + terms["chosen_loss"]).backward()
    gradient = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return tensors, {name: value.item() for name, value in terms.items()}, gradient


MESHES = {
    "8x1": (8, 1),
    "4x2_accumulated": (4, 2, 1),
    "1x1": (1, 1),
    "1x1_accumulated": (1, 1, 4),
    "1x8": (1, 8),
}
IN_ANY_TEST_RUN = ("8x1", "4x2_accumulated")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in IN_ANY_TEST_RUN else pytest.mark.slow) for c in MESHES]
)
def test_terms_and_gradient_equal_torch_on_every_mesh_and_in_parts(case, devices):
    tensors, expected, gradient = torchs()
    setup, rules = pair_setup(*MESHES[case]), CONFIG.weight_rules()
    arrays = named_arrays(CONFIG, tensors)
    history, found = setup.run(devices, arrays=arrays, steps=1)
    assert 0 < expected["accuracy"] < 1
    for name, value in expected.items():
        assert history[0][name] == pytest.approx(value, rel=1e-5), name
    assert history[0]["weight"] == IS_PAIR[0].sum() < ROWS
    plan, _, _ = setup.programs()
    for leaf in (p.leaf for p in plan.parameters.leaves):
        moved = arrays[leaf.path] - found[f"model.{leaf.path}"]
        want = leaf_from_source(leaf, rules, gradient)
        np.testing.assert_allclose(moved, want, atol=1e-5, rtol=1e-3, err_msg=leaf.path)


class Tracker:
    def __init__(self):
        self.logged = {}

    def log(self, metrics, *, step):
        self.logged[step] = dict(metrics)


def test_the_loop_and_the_trackers_take_it_as_it_is(devices):
    _, expected, _ = torchs()
    setup = pair_setup(8, 1)
    mesh = setup.spec.build(devices)
    _, _, program = setup.programs()
    jitted = program.jit(mesh)
    size, told = StepSize(rows=ROWS, tokens=2 * ROWS * POSITIONS, flops=1.0), []
    track = Track(tracker=Tracker(), size_of=lambda _: size, steps=2, tokens=0)  # pyright: ignore
    loop = Loop(step_of=lambda _: lambda state, batch: jitted(state, None, batch), listeners=[track, told.append])
    state = setup.start(mesh, named_arrays(CONFIG, torchs()[0]))
    ended = loop.run(state, ((n, setup.batch(n, mesh)) for n in range(2)), first=0)
    assert ended.taken == 2 and int(ended.state.step) == 2
    logged = track.tracker.logged  # pyright: ignore
    for name, value in expected.items():
        assert logged[0][f"train/{name}"] == pytest.approx(value, rel=1e-5)
    assert "train/z_loss" not in logged[0]
    # What is only shown is not weighted, and has moved with the step.
    assert logged[1]["train/accuracy"] * 16 == pytest.approx(round(logged[1]["train/accuracy"] * 16))
    assert [report.weight for report in told] == [13.0, 16.0]


def test_what_is_minimized_leaves_out_what_is_only_shown():
    sums = Sums({LOSS: jnp.float32(2), "chosen_loss": jnp.float32(40), "accuracy": jnp.float32(7)})
    assert float(Preference().minimized(sums, START)) == pytest.approx(2 + WEIGHT * 40)
    shown = {name: float(value) for name, value in Preference().shown(sums, START).items()}
    assert shown == pytest.approx({LOSS: 2.0, "chosen_loss": WEIGHT * 40, "accuracy": 7.0})
