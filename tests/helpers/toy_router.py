"""A toy router: each row goes to one expert, and the objective is the squared error of that expert's output.

It has what language modeling does not: a term whose weight follows a schedule, and a normalizer that the host computes.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from haliax_ext.abstract import leaves, with_arrays
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.prefetch import place
from haliax_ext.program import Program
from levanter.layers.outputs import Sums
from levanter.models.precision import Precision
from levanter.optim import AdamConfig
from levanter.trainer.objective import LOSS, Objective, Statistic, Term, Weight
from levanter.trainer.state import StatePlan, abstract_state, plan_state, without_ruled
from levanter.trainer.step import StepRecipe, step_program
from levanter.trainer.update_rules import UpdateRule

ROWS, STEPS = 16, 4
Embed, Expert = hax.Axis("embed", 8), hax.Axis("expert", 4)
PRECISION = Precision.parse("f32")
ADAM = AdamConfig(learning_rate=1e-2, warmup=0, lr_schedule="constant", weight_decay=0.1)


class Router(eqx.Module):
    """Logits of the experts, and an output vector for each.

    Attributes:
        router: `[expert, embed]`.
        experts: `[expert, embed]`.
        balance_bias: `[expert]`, added to the logits for the choice alone.
    """

    router: hax.NamedArray
    experts: hax.NamedArray
    balance_bias: hax.NamedArray

    @staticmethod
    def init(key: jax.Array) -> "Router":
        """Random weights."""
        for_router, for_experts = jax.random.split(key)
        axes = (Expert, Embed)
        weights = {"router": hax.random.normal(for_router, axes), "experts": hax.random.normal(for_experts, axes)}
        return Router(**weights, balance_bias=hax.zeros(Expert))


class Rows(eqx.Module):
    """Vectors to route and the outputs to learn.

    Attributes:
        inputs: float32 `[batch, embed]`.
        targets: float32 `[batch]`.
        total: float32 scalar, the normalizer: a number that the rows themselves do not tell.
    """

    inputs: hax.NamedArray
    targets: hax.NamedArray
    total: hax.NamedArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterObjective(Objective[Router, Rows]):
    """The squared error of the chosen expert, and a penalty on the logits.

    Attributes:
        penalty: weight of the squared logits.
        rate: change of the balance bias in a step; None for a bias that the optimizer sees like any other parameter.
    """

    penalty: Weight = 0.0
    rate: float | None = None

    @property
    def terms(self):
        return (Term(name=LOSS), Term(name="penalty", weight=self.penalty))

    @property
    def statistics(self):
        return () if self.rate is None else (Statistic(name="load", axes=(Expert,)),)

    @property
    def rules(self):
        return () if self.rate is None else (UpdateRule(pattern="balance_bias", update=self._balanced),)

    def _balanced(self, bias, sums):
        # Wang et al., arXiv:2408.15664: experts with less than the mean load become more likely.
        assert self.rate is not None
        return bias + self.rate * jnp.sign(jnp.mean(sums["load"]) - sums["load"])

    def abstract_batch(self, Batch, Pos):
        def of(*axes):
            return hax.NamedArray(jax.ShapeDtypeStruct(tuple(a.size for a in axes), np.dtype(np.float32)), axes)  # pyright: ignore

        return Rows(inputs=of(Batch, Embed), targets=of(Batch), total=of())

    def rows(self, batch):
        return batch.targets.axes[0]

    def normalizer(self, batch):
        return batch.total.scalar()

    def sums(self, model, batch, at):
        logits = hax.dot(batch.inputs, model.router, axis=Embed)
        chosen = hax.nn.one_hot(hax.argmax(logits + model.balance_bias, Expert), Expert, dtype=jnp.float32)
        outputs = hax.dot(batch.inputs, model.experts, axis=Embed) * hax.nn.softmax(logits, Expert)
        error = hax.sum(outputs * chosen, Expert) - batch.targets
        load = {} if self.rate is None else {"load": hax.sum(chosen, batch.targets.axes).array}
        return Sums({LOSS: hax.sum(error**2).scalar(), "penalty": hax.sum(logits**2).scalar(), **load})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterRun:
    """A few steps of the toy on a mesh with one axis of data.

    Attributes:
        devices: the size of the mesh.
        accumulation: microbatches per step.
        objective: what is minimized.
    """

    devices: int = 1
    accumulation: int = 1
    objective: RouterObjective = RouterObjective()

    @property
    def mappings(self) -> Mappings:
        """Rows and the embedding axis of parameters over `data`."""
        return Mappings(params=AxisMapping({"embed": "data"}), compute=AxisMapping({"batch": "data"}))

    def programs(self) -> tuple[StatePlan, Program]:
        """The placement of the state, and the step."""
        optimizer = without_ruled(ADAM.build(STEPS), self.objective.rules)
        state = abstract_state(lambda: Router.init(jax.random.key(0)), optimizer, PRECISION)  # pyright: ignore
        plan = plan_state(state, self.mappings, MeshSpec.of(data=self.devices), rules=self.objective.rules)
        recipe = StepRecipe(
            objective=self.objective,
            optimizer=optimizer,
            schedule=ADAM.schedule(STEPS),
            precision=PRECISION,
            accumulation=self.accumulation,
            parameters=plan.parameters,
        )
        batch = self.objective.abstract_batch(hax.Axis("batch", ROWS), hax.Axis("position", 1))
        return plan, step_program(recipe, state=state, plan=plan, batch=batch, mappings=self.mappings)

    def start(self) -> dict[str, np.ndarray]:
        """The first state by path: random parameters, statistics of zero."""
        _, program = self.programs()
        arrays = {leaf.path: np.zeros(leaf.shape, leaf.dtype) for leaf in leaves(program.input("state").value)}
        model = Router.init(jax.random.key(0))
        return arrays | {
            f"model.{leaf.path}": np.asarray(x) for leaf, x in zip(leaves(model), jax.tree.leaves(model), strict=True)
        }

    def run(self, arrays=None, *, first: int = 0, stop: int = STEPS):
        """Steps `first` to `stop`: their metrics, and the state after the last by path."""
        plan, program = self.programs()
        mesh = plan.whole.mesh.build(jax.devices()[: self.devices])
        arrays = self.start() if arrays is None else arrays
        placed = {p: jax.device_put(x, plan.whole.sharding(p, mesh)) for p, x in arrays.items()}
        state, step, history = with_arrays(program.input("state").value, placed), program.jit(mesh), []
        for n in range(first, stop):
            state, metrics = step(state, None, place(program.input("batch"), rows(n), mesh))
            history.append(metrics)
        return history, {
            leaf.path: np.asarray(x) for leaf, x in zip(leaves(state), jax.tree.leaves(state), strict=True)
        }


def rows(step: int) -> dict[str, np.ndarray]:
    """The batch of a step, by path; the normalizer is not the number of rows."""
    rng = np.random.default_rng(step)
    inputs, targets = rng.normal(size=(ROWS, Embed.size)) + 0.5, rng.normal(size=ROWS)
    return {
        "inputs": inputs.astype(np.float32),
        "targets": np.asarray(targets, np.float32),
        "total": np.array(10 + step, np.float32),
    }
