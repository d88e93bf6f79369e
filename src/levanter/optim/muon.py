"""Muon (Jordan et al., 2024): orthogonalized momentum of matrices, on named axes.

The update of a matrix is its momentum with all singular values moved near 1 by a few Newton–Schulz steps, or steps of
the Polar Express, which consist of matrix products only. This makes sense for matrices between hidden layers; AdamW
updates embeddings, the output head, norms and biases. A projection over several heads is one matrix, output axes ×
input axes, and every layer of a stack is a separate matrix.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
import optax

from haliax_ext.pytree import PyTree
from levanter.config.validators import Count, Decay, Epsilon, LearningRate, NonNegativeFloat, PositiveInt, Ranged
from levanter.optim.config import OptimizerConfig
from levanter.optim.groups import Group, GroupConfig, by_group, selected
from levanter.optim.parameters import Parameter, map_parameters
from levanter.optim.schedules import Cycle, Schedule

Coefficients = Literal["quintic", "simple"]
COEFFICIENTS: dict[str, tuple[float, float, float]] = {
    # Steep at 0, so that small singular values grow fast; the final ones are between about 0.7 and 1.2.
    "quintic": (3.4445, -4.7750, 2.0315),
    # The classical iteration: slower, but converges to 1.
    "simple": (2.0, -1.5, 0.5),
}


Polynomial = tuple[float, float, float]
Polar = Literal["newton_schulz", "polar_express"]

POLAR_EXPRESS: tuple[Polynomial, ...] = (
    # Amsel et al., arXiv:2505.16932, for 5 steps, a safety factor of 0.02 and a cushion of 2: each step has the
    # polynomial that is best for the singular values that the steps before it leave.
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
POLAR_EXPRESS_MARGIN = 1.01
"""These polynomials diverge above 1, so a matrix is divided by a little more than its norm."""


@dataclass(frozen=True, kw_only=True)
class MomentumSchedule(Ranged):
    """The momentum of matrices over a run: it rises to `momentum`, and falls while the learning rate decays.

    Attributes:
        start: at the first step.
        warmup: steps until it is `momentum`.
        final: at the end of the run.
    """

    start: Decay = 0.85
    warmup: Count = 400
    final: Decay = 0.90

    def build(self, peak: float, cycle: Cycle) -> Schedule:
        """The momentum at each step.

        Args:
            peak: between the two phases.
            cycle: the last of the run, in which the learning rate decays.
        """
        falls = cycle.end - cycle.falling

        def at(step: jax.Array) -> jax.Array:
            now = step.astype(jnp.float32)
            rising = self.start + (peak - self.start) * now / max(self.warmup, 1)
            share = jnp.maximum(now - falls, 0.0) / max(cycle.falling, 1)
            # A run that decays before the end of the warmup warms up first.
            return jnp.where(step < self.warmup, rising, peak + (self.final - peak) * share)

        return at


class MuonState(NamedTuple):
    """What is kept of every matrix.

    Attributes:
        momentum: the sum or the mean of its gradients.
        second_moment: the mean square of its updates, along the longer side; None without NorMuon.
        count: the number of updates, int32; None if no setting depends on it.
    """

    momentum: PyTree
    second_moment: PyTree = None
    count: jax.Array | None = None


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether Muon updates a parameter: the matrix of a projection that is not the output head."""
    projects = parameter.role == "matrix" and bool(parameter.inputs) and "head" not in parameter.roles
    return projects and parameter.factors is not None


@dataclass(frozen=True, kw_only=True)
class MuonRule:
    """How a matrix is updated.

    Attributes:
        momentum: decay rate of the momentum, or a function of the step.
        average: whether the momentum is a mean of the gradients (and Nesterov's step the mean of both) or a sum.
        nesterov: whether the gradient is added once more before the orthogonalization.
        row_equalize: whether all rows are scaled to their mean norm before it (MuonEq, arXiv:2603.28254).
        polynomials: of each step of the iteration.
        margin: a matrix is divided by this times its norm.
        epsilon: added to the norm that divides a matrix.
        renormalize: whether the result gets the norm of an orthogonal matrix, `√min(rows, columns)` (Muon+,
            arXiv:2602.21545).
        second_moment: decay rate of the mean square of the updates along the longer side, by whose root rows or
            columns are divided, while the whole norm stays (NorMuon, arXiv:2510.05491); None for no division.
        kimi: whether the result is scaled by `0.2·√max(rows, columns)` (Moonshot AI, arXiv:2502.16982: about the size
            of AdamW's updates) instead of `√max(1, rows / columns)`.
        cautious_decay: weight decay as a function of the step, for the elements that the update moves towards zero
            only, and scaled like the update; None for none.
    """

    momentum: float | Schedule = 0.95
    average: bool = False
    nesterov: bool = True
    row_equalize: bool = False
    polynomials: Sequence[Polynomial] = (COEFFICIENTS["quintic"],) * 5
    margin: float = 1.0
    epsilon: float = 1e-8
    renormalize: bool = False
    second_moment: float | None = None
    kimi: bool = False
    cautious_decay: Schedule | None = None

    @property
    def counts(self) -> bool:
        """Whether some setting depends on the step."""
        return callable(self.momentum) or self.cautious_decay is not None

    def momentum_at(self, count: jax.Array | None) -> float | jax.Array:
        """The decay rate of the momentum at a step."""
        if not callable(self.momentum):
            return self.momentum
        assert count is not None
        return self.momentum(count)

    def scale(self, rows: int, columns: int) -> float:
        """The factor of an orthogonal matrix."""
        # An orthogonal matrix has root mean square 1/√max(rows, columns), so Moonshot's factor gives updates of about
        # 0.2 per element, as AdamW's are.
        return 0.2 * math.sqrt(max(rows, columns)) if self.kimi else math.sqrt(max(1.0, rows / columns))

    def orthogonal(self, matrices: jax.Array) -> jax.Array:
        """The orthogonalized matrices `[stack, rows, columns]`."""
        if self.row_equalize:
            row_norms = jnp.maximum(_norm(matrices, -1), 1e-6)
            matrices = matrices * (_norm(matrices, (-2, -1)) / math.sqrt(matrices.shape[-2]) / row_norms)
        matrices = polar(matrices, self.polynomials, epsilon=self.epsilon, margin=self.margin)
        if self.renormalize:
            target = math.sqrt(min(matrices.shape[-2:]))
            matrices = matrices * (target / jnp.maximum(_norm(matrices, (-2, -1)), 1e-6))
        return matrices

    def divided(self, matrices: jax.Array, kept: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The matrices divided along their longer side, with the same norm; and the new mean squares, `[stack, side]`.

        Args:
            matrices: `[stack, rows, columns]`.
            kept: the mean squares so far.
        """
        assert self.second_moment is not None
        # Over the shorter side: a tall matrix has a mean square for each row.
        shorter = -1 if matrices.shape[-2] >= matrices.shape[-1] else -2
        squares = jnp.mean(jnp.square(matrices), axis=shorter, keepdims=True)
        kept = kept.reshape(squares.shape)
        kept = kept + (squares - kept) * (1 - self.second_moment)
        factors = jax.lax.rsqrt(jnp.maximum(kept, 1e-10))
        # Both norms from the mean squares, which are smaller than the matrices.
        size = matrices.shape[shorter]
        before, after = (
            jnp.sqrt(jnp.sum(x, axis=(-2, -1), keepdims=True) * size) for x in (squares, squares * factors**2)
        )
        return matrices * factors * (before / jnp.maximum(after, 1e-10)), kept.reshape(kept.shape[0], -1)


def _norm(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axis, keepdims=True))


def _longer_side(parameter: Parameter, x: hax.NamedArray) -> tuple[hax.Axis, ...]:
    """The stack axes and the axes of the longer side of a matrix; of its rows if it is square."""
    factors = parameter.factors
    assert factors is not None, f"{parameter.path} is not a matrix"
    rows, columns = (math.prod(x.axis_size(name) for name in names) for names in factors)
    return tuple(x.resolve_axis(name) for name in (*parameter.stack, *(factors[0] if rows >= columns else factors[1])))


class _Updated(NamedTuple):
    """The results for one matrix."""

    update: hax.NamedArray
    momentum: hax.NamedArray
    second_moment: hax.NamedArray | None


def scale_by_muon(rule: MuonRule) -> optax.GradientTransformation:
    """Replaces gradients of matrices by their orthogonalized and scaled momentum."""

    def init(params: PyTree) -> MuonState:
        second = None
        if rule.second_moment is not None:
            second = map_parameters(lambda p, x: hax.zeros(_longer_side(p, x), dtype=jnp.float32), params)
        return MuonState(
            momentum=map_parameters(lambda _, x: hax.zeros(x.axes, dtype=jnp.float32), params),
            second_moment=second,
            count=jnp.zeros((), jnp.int32) if rule.counts else None,
        )

    def update(grads: PyTree, state: MuonState, params: PyTree = None) -> tuple[PyTree, MuonState]:
        count = state.count
        decay = rule.momentum_at(count)
        cautious = None if rule.cautious_decay is None else rule.cautious_decay(count)  # pyright: ignore
        weight = 1 - decay if rule.average else 1.0

        def one(parameter: Parameter, grad: hax.NamedArray, kept: hax.NamedArray, *more: hax.NamedArray) -> _Updated:
            second, weights = (more[0] if rule.second_moment is not None else None), more[-1]
            exact = grad.astype(jnp.float32)
            kept = kept * decay + exact * weight
            # Nesterov: the momentum one step ahead.
            ahead = kept * decay + exact * weight if rule.nesterov else kept
            factors = parameter.factors
            assert factors is not None, f"{parameter.path} is not a matrix"
            # Stack axes first, then the axes of rows and of columns: a batch of matrices `[stack, rows, columns]`.
            rows, columns = (math.prod(ahead.axis_size(name) for name in names) for names in factors)
            order = tuple(ahead.resolve_axis(name) for name in (*parameter.stack, *factors[0], *factors[1]))
            ordered = ahead.rearrange(order)
            updates = rule.orthogonal(ordered.array.reshape(-1, rows, columns))
            if second is not None:
                updates, squares = rule.divided(updates, second.array.reshape(updates.shape[0], -1))
                second = hax.named(squares.reshape(second.array.shape), second.axes)
            if cautious is not None:
                old = weights.astype(jnp.float32).rearrange(order).array.reshape(updates.shape)
                updates = updates + cautious * jnp.where(updates * old >= 0, old, 0.0)
            updates = updates * rule.scale(rows, columns)
            named = hax.named(updates.reshape(ordered.array.shape), order).rearrange(grad.axes).astype(grad.dtype)
            return _Updated(named, kept, second)

        trees = [state.momentum, *([] if rule.second_moment is None else [state.second_moment])]
        # Without decay the parameters are not read, and a caller need not pass them.
        updated = map_parameters(one, grads, *trees, grads if cautious is None else params)

        def field(name: str) -> PyTree:
            return jax.tree.map(lambda x: getattr(x, name), updated, is_leaf=lambda x: isinstance(x, _Updated))

        return field("update"), MuonState(
            momentum=field("momentum"),
            second_moment=None if rule.second_moment is None else field("second_moment"),
            count=None if count is None else jnp.asarray(optax.safe_increment(count)),
        )

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def orthogonal(matrices: jax.Array, *, steps: int, epsilon: float, polynomial: tuple[float, float, float]) -> jax.Array:
    """The matrices `[stack, rows, columns]` with singular values near 1, by `X ← aX + (bXXᵀ + c(XXᵀ)²)X`.

    >>> stack = jnp.array([[[2.0, 0.0], [0.0, 0.5]]])
    >>> simple = jax.jit(lambda x: orthogonal(x, steps=12, epsilon=1e-8, polynomial=COEFFICIENTS["simple"]))
    >>> [[round(x, 2) for x in row] for row in simple(stack)[0].tolist()]
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return polar(matrices, (polynomial,) * steps, epsilon=epsilon)


def polar(matrices: jax.Array, polynomials: Sequence[Polynomial], *, epsilon: float, margin: float = 1.0) -> jax.Array:
    """The matrices `[stack, rows, columns]` with singular values near 1, by a polynomial for each step.

    Args:
        matrices: any; a tall one is transposed for the products.
        polynomials: coefficients of s, s³ and s⁵ in the new singular value.
        epsilon: added to the norm that divides a matrix.
        margin: the norm is multiplied by this.
    """
    # X Xᵀ has the size of the first axis, so a tall matrix is transposed: the products are those of the smaller side.
    upright = matrices.shape[1] > matrices.shape[2]
    x = matrices.swapaxes(1, 2) if upright else matrices
    # The Frobenius norm bounds the largest singular value, which must be at most 1 for the iteration to converge.
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) * margin + epsilon)
    for a, b, c in polynomials:
        # On the singular values this is s ← a·s + b·s³ + c·s⁵; the singular vectors do not change.
        square = x @ x.swapaxes(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.swapaxes(1, 2) if upright else x


@OptimizerConfig.register_subclass("muon")
@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon for the matrices between hidden layers; AdamW for embeddings, the output head, norms and biases.

    Attributes:
        learning_rate: of the matrices.
        adam_lr: the peak for all others; it rises and falls as `learning_rate` does.
        lr: upstream's key, without effect: `learning_rate` is what counts.
        momentum: of the matrices: the part that is kept.
        nesterov: whether the gradient is added once more.
        backend_steps: steps of the iteration that makes a matrix orthogonal.
        coefficient_type: its polynomial: `quintic` (fast, singular values about 0.7 to 1.2) or `simple` (slow, exact).
        muon_epsilon: added to the norm that a matrix is divided by.
        use_kimi_scaling: whether updates are scaled to AdamW's size, so that its learning rates and weight decay fit.
        beta1, beta2, epsilon: of AdamW.
        weight_decay: of the matrices.
        adam_weight_decay: of all others; null for that of the matrices.
        rule: `muon`, or `adam` to update all parameters (of a group) by AdamW.
        polar: the iteration: `newton_schulz` with the polynomial of `coefficient_type`, or `polar_express`, whose
            steps have a polynomial each (at most 5).
        average_momentum: whether the momentum is a mean of gradients instead of a sum.
        momentum_schedule: how the momentum changes; null for a constant one.
        row_equalize, renormalize: see `MuonRule`.
        second_moment: decay rate of NorMuon's mean squares; null for none.
        cautious_decay: whether only elements that the update moves towards zero decay.
        weight_decay_schedule: of the matrices, besides the learning rate's: `constant`, or `cosine` to 0.
        warm_first_step: whether the warmup begins with its first part instead of 0.
        max_grad_norm: of all but the matrices, whose update does not depend on the gradient's size.
    """

    lr: LearningRate = 0.02
    adam_lr: LearningRate = 6e-4
    momentum: Decay = 0.95
    nesterov: bool = True
    backend_steps: PositiveInt = 5
    coefficient_type: Coefficients = "quintic"
    muon_epsilon: Epsilon = 1e-8
    use_kimi_scaling: bool = False
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: Epsilon = 1e-8
    weight_decay: float = 0.0
    adam_weight_decay: NonNegativeFloat | None = None
    rule: Literal["muon", "adam"] = "muon"
    polar: Polar = "newton_schulz"
    average_momentum: bool = False
    momentum_schedule: MomentumSchedule | None = None
    row_equalize: bool = False
    renormalize: bool = False
    second_moment: Decay | None = None
    cautious_decay: bool = False
    weight_decay_schedule: Literal["constant", "cosine"] = "constant"
    warm_first_step: bool = False

    def _unsupported(self) -> Iterable[str]:
        if self.learning_rate == 0:
            yield "learning_rate: must be positive; adam_lr is scaled from it"
        if self.backend_steps < 1:
            yield f"backend_steps: must be at least 1, got {self.backend_steps}"
        if self.polar == "polar_express" and self.backend_steps > len(POLAR_EXPRESS):
            yield f"backend_steps: the Polar Express has {len(POLAR_EXPRESS)} steps, got {self.backend_steps}"
        if self.weight_decay_schedule != "constant" and not self.cautious_decay:
            yield "weight_decay_schedule: only of a cautious decay; set cautious_decay: true"

    def schedule(self, num_train_steps: int) -> Schedule:
        schedule = super().schedule(num_train_steps)
        rising = self._cycles(num_train_steps)[0].rising
        if not self.warm_first_step or not rising:
            return schedule
        # As if the run had begun one step earlier, up to the end of the warmup.
        return lambda step: jnp.where(step < rising, self.learning_rate * (step + 1) / rising, schedule(step))

    def scaling(self) -> optax.GradientTransformation:
        return scale_by_muon(self._muon_rule(None))

    def _muon_rule(self, num_train_steps: int | None) -> MuonRule:
        """How matrices are updated in a run of so many steps; None for the values of the first step."""
        momentum, decay = self.momentum, None
        if self.momentum_schedule is not None:
            cycle = self._cycles(num_train_steps or 1)[-1]
            momentum = self.momentum_schedule.build(self.momentum, cycle)
        if self.cautious_decay:
            cosine = self.weight_decay_schedule == "cosine"
            decay = optax.cosine_decay_schedule(self.weight_decay, num_train_steps or 1) if cosine else None
            decay = decay or optax.constant_schedule(self.weight_decay)
        express = self.polar == "polar_express"
        steps = self.backend_steps
        return MuonRule(
            momentum=momentum,
            average=self.average_momentum,
            nesterov=self.nesterov,
            row_equalize=self.row_equalize,
            polynomials=POLAR_EXPRESS[:steps] if express else (COEFFICIENTS[self.coefficient_type],) * steps,
            margin=POLAR_EXPRESS_MARGIN if express else 1.0,
            epsilon=self.muon_epsilon,
            renormalize=self.renormalize,
            second_moment=self.second_moment,
            kimi=self.use_kimi_scaling,
            cautious_decay=decay,  # pyright: ignore[reportArgumentType]
        )

    def stages(
        self, schedule: Schedule, *, platform: str | None = None, num_train_steps: int | None = None
    ) -> list[optax.GradientTransformation]:
        del schedule
        # Clipping is part of AdamW's chain: an orthogonalized update does not depend on the gradient's size.
        others = self.weight_decay if self.adam_weight_decay is None else self.adam_weight_decay
        adam = [
            self.clipping(platform),
            optax.scale_by_adam(self.beta1, self.beta2, self.epsilon),
            self.decaying(others),
            # The learning rate that follows is that of the matrices; this factor turns its peak into `adam_lr`.
            optax.scale(self.adam_lr / self.learning_rate),
        ]
        # A cautious decay depends on the update, so it is a part of the first stage.
        decay = optax.identity() if self.cautious_decay else self.decaying(self.weight_decay)
        return self._by_rule([scale_by_muon(self._muon_rule(num_train_steps)), decay], adam)

    def _by_rule(
        self, matrices: list[optax.GradientTransformation], others: list[optax.GradientTransformation]
    ) -> list[optax.GradientTransformation]:
        """A chain for the parameters that Muon updates, and one for all others."""

        def by_muon(parameter: Parameter) -> bool:
            # A group may choose the rule; outside of `groups` it is that of the optimizer.
            rules = [group.rule for key, group in (self.groups or {}).items() if selected(key, parameter)]
            rule = next((rule for rule in rules if rule is not None), self.rule)
            return rule == "muon" and is_hidden_matrix(parameter)

        return by_group(
            [
                Group(name="matrices", includes=by_muon, chain=matrices),
                Group(name="others", includes=lambda parameter: not by_muon(parameter), chain=others),
            ]
        )

    def clipping_before_groups(self, platform: str | None = None) -> optax.GradientTransformation:
        # Here too, matrices neither count for the norm nor are scaled.
        return optax.chain(*self._by_rule([optax.identity()], [self.clipping(platform)]))

    def group_fields(self, settings: GroupConfig) -> dict[str, Any]:
        changes = super().group_fields(settings)
        # A group may have matrices and others; its learning rate and decay replace those of both.
        if settings.learning_rate is not None:
            changes["adam_lr"] = settings.learning_rate
        if settings.learning_rate_multiple is not None:
            changes["adam_lr"] = self.adam_lr * settings.learning_rate_multiple
        if settings.weight_decay is not None:
            changes["adam_weight_decay"] = settings.weight_decay
        return changes
