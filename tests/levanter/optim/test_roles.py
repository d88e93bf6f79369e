"""What a parameter is comes from the module that declares it, and decides what decays and what is Muon's."""

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis, NamedArray
from helpers.operands import low_rank
from helpers.published_configs import PUBLISHED

from haliax_ext.abstract import abstract
from levanter.compat.hf.config_bridge import read_config
from levanter.layers.linear import Linear
from levanter.layers.param_roles import role
from levanter.optim.muon import is_hidden_matrix
from levanter.optim.parameters import decay_mask, map_parameters

Out, In = Axis("mlp", 6), Axis("embed", 4)


def parameters(model) -> dict:
    found = {}
    map_parameters(lambda parameter, _: found.__setitem__(parameter.path, parameter), model)
    return found


def decayed(model, modules=None, default=None) -> set[str]:
    mask = decay_mask(modules, default)
    assert mask is not None
    found = set()
    map_parameters(lambda parameter, _, on: found.add(parameter.path) if on else None, model, mask(model))
    return found


def by_class_names(model) -> tuple[set[str], set[str], dict]:
    """What decays, what is Muon's, and rows and columns, as texts of classes and paths decided it before roles did."""
    decays, muons, factors = set(), set(), {}

    def visit(keys, x):
        holder = model
        for key in keys[:-1]:
            holder = getattr(holder, key.name) if hasattr(key, "name") else holder[key.idx]
        path = ".".join(str(getattr(key, "name", getattr(key, "idx", None))) for key in keys)
        kind = type(holder).__name__
        names = [axis.name for axis in x.axes if axis.name not in ("layers", "expert")]
        inputs = getattr(holder, "In", None)
        columns = None
        if inputs is not None and set(inputs) < set(names):
            columns = tuple(inputs)
        elif inputs is None and len(names) > 1:
            columns = (names[-1],)
        factors[path] = columns and (tuple(name for name in names if name not in columns), columns)
        if "Norm" not in kind and "Embedding" not in kind and not path.endswith("bias"):
            decays.add(path)
        if inputs is not None and columns is not None and "lm_head" not in path.split("."):
            muons.add(path)
        return x

    jax.tree_util.tree_map_with_path(visit, model, is_leaf=lambda x: isinstance(x, NamedArray))
    return decays, muons, factors


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_family_is_treated_as_before(name):
    config = read_config(PUBLISHED[name]).config
    Vocab = Axis("vocab", config.vocab_size or 0)
    model = abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))
    found = parameters(model)
    decays, muons, factors = by_class_names(model)
    assert decayed(model) == decays and decays
    assert {path for path, parameter in found.items() if is_hidden_matrix(parameter)} == muons and muons
    assert {path: parameter.factors for path, parameter in found.items()} == factors


class EmbeddingMixer(eqx.Module):
    """A projection by its declaration, whatever it is called."""

    kernel: NamedArray = eqx.field(metadata=role("matrix"))
    shift: NamedArray = eqx.field(metadata=role("bias"))
    In: tuple[str, ...] = eqx.field(static=True)


class Rescale(eqx.Module):
    """A norm that is not called one."""

    gain: NamedArray = eqx.field(metadata=role("norm"))


class Undeclared(eqx.Module):
    """Says nothing of its arrays."""

    square: NamedArray
    line: NamedArray


class Model(eqx.Module):
    """One of each, and a head whose owner says that it is one."""

    mixer: EmbeddingMixer
    rescale: Rescale
    undeclared: Undeclared
    table: hax.nn.Embedding
    scores: Linear = eqx.field(metadata=role("head"))


def model() -> Model:
    ones = hax.ones
    return Model(
        mixer=EmbeddingMixer(kernel=ones((Out, In)), shift=ones((Out, In)), In=("embed",)),
        rescale=Rescale(gain=ones((Out, In))),
        undeclared=Undeclared(square=ones((Out, In)), line=ones((Axis("layers", 2), In))),
        table=hax.nn.Embedding.init(Axis("vocab", 3), In, key=jax.random.key(0)),
        scores=Linear(weight=ones((Axis("vocab", 3), In)), bias=None, In=("embed",)),
    )


def test_declarations_decide_and_names_of_classes_do_not():
    roles = {path: parameter.role for path, parameter in parameters(model()).items()}
    assert roles == {
        "mixer.kernel": "matrix",
        "mixer.shift": "bias",
        "rescale.gain": "norm",
        "undeclared.square": "matrix",
        "undeclared.line": "vector",
        "table.weight": "embedding",
        "scores.weight": "matrix",
    }
    assert decayed(model()) == {"mixer.kernel", "undeclared.square", "scores.weight"}
    assert {path for path, parameter in parameters(model()).items() if is_hidden_matrix(parameter)} == {"mixer.kernel"}


def test_a_user_still_picks_by_class_path():
    assert decayed(model(), modules=["Mixer.shift"]) == {"mixer.shift"}
    assert decayed(model(), modules=r"Linear\.weight|.*gain") == {"scores.weight", "rescale.gain"}


def test_the_arrays_of_an_operand_are_what_their_field_is():
    """By the path of a user's rule too: what is inside of a projection's weight is the projection's weight."""
    operand = low_rank(hax.ones((Out, In)), ("embed",), np.random.default_rng(0))
    found = parameters(Linear(weight=operand, bias=hax.ones(Out), In=("embed",)))
    assert {path: (p.role, p.class_path, p.factors) for path, p in found.items()} == {
        "weight.base": ("matrix", "Linear.weight", (("mlp",), ("embed",))),
        "weight.a": ("matrix", "Linear.weight", (("low_rank",), ("embed",))),
        "weight.b": ("matrix", "Linear.weight", (("mlp",), ("low_rank",))),
        "bias": ("bias", "Linear.bias", None),
    }
