"""Which exchange `auto` chooses and why, what a mapping spells, and each thing that can be wrong with one."""

from dataclasses import replace

import pytest

from haliax_ext.errors import ShardingError
from haliax_ext.mapping import AxisMapping
from haliax_ext.meshspec import MeshSpec
from levanter.config import parse_text
from levanter.mesh import MeshConfig, ModelAxes, resolve
from levanter.mesh.context_parallel import busiest_share, choose, gathered_bytes, method_from_mapping

pytestmark = pytest.mark.quick

GIB = 2**30
SIZES = dict(
    vocab=1024, embed=64, mlp=128, kv_head=4, q_heads_per_group=2, head_size=16, layers=2, position=64, key_position=64
)
MODEL = ModelAxes(sizes={name: n for name, n in SIZES.items() if name != "key_position"}, known=SIZES)
CUT = {"position": "context"}


def resolved(attention, *, context=4, order=None, compute=CUT, hbm_gib=None, **axes):
    config = MeshConfig(
        axes={"context": context, **axes},
        compute_mapping=compute,
        attention_mapping=attention,
        position_order=order,
        hbm_gib=hbm_gib,
    )
    return resolve(config, MODEL, devices=8)


@pytest.mark.parametrize(
    ("positions", "kv_heads", "head_size", "gib"),
    [(65_536, 12, 128, 0.375), (131_072, 8, 128, 0.5), (1_048_576, 8, 128, 4)],
)
def test_gathered_keys_and_values_of_known_models(positions, kv_heads, head_size, gib):
    assert gathered_bytes(kv_heads=kv_heads, head_size=head_size, positions=positions, heads_ways=1) == gib * GIB


@pytest.mark.parametrize(
    ("kv_heads", "heads_ways", "position_ways", "positions", "hbm", "exchange"),
    [
        (12, 1, 4, 65_536, 31.25, "heads"),
        (12, 1, 8, 65_536, 31.25, "gather"),  # 0.375 GiB of 1.5625
        (12, 2, 8, 65_536, 31.25, "gather"),
        (8, 1, 64, 1_048_576, 95, "gather"),  # 4 GiB of 4.75
        (8, 1, 64, 1_048_576, 31.25, "ring"),
        (8, 1, 64, 1_048_576, None, "gather"),
        (8, 2, 4, 1_048_576, 31.25, "heads"),
    ],
)
def test_what_auto_chooses(kv_heads, heads_ways, position_ways, positions, hbm, exchange):
    found = choose(
        kv_heads=kv_heads,
        head_size=128,
        positions=positions,
        heads_ways=heads_ways,
        position_ways=position_ways,
        hbm_bytes=None if hbm is None else int(hbm * GIB),
    )
    assert found.method == exchange
    assert str(found).startswith(f"{exchange}: {kv_heads} kv_head ")


def test_the_reason_of_a_ring_has_its_numbers():
    found = choose(
        kv_heads=8, head_size=128, positions=2**20, heads_ways=1, position_ways=64, hbm_bytes=int(31.25 * GIB)
    )
    assert str(found) == (
        "ring: 8 kv_head do not divide by 64, and gathered keys and values of a sequence and layer are 4 GiB, more "
        "than 5% of 31.25 GiB"
    )


@pytest.mark.parametrize(
    ("kv_heads", "hbm", "seconds", "text"),
    [
        (
            12, 31.25, dict(gather=0.0096, heads=0.0034, ring=0.0046),
            "heads: a layer waits 3.4 ms for a sequence by arithmetic, 9.6 ms for gather, 4.6 ms for ring",
        ),
        # What is within a twentieth of the least is alike, and the first of it is taken.
        (
            12, 31.25, dict(gather=0.0096, heads=0.0035, ring=0.0034),
            "heads: a layer waits 3.5 ms for a sequence by arithmetic, 9.6 ms for gather, 3.4 ms for ring",
        ),
        (
            6, 31.25, dict(gather=0.0096, ring=0.0046),
            "ring: a layer waits 4.6 ms for a sequence by arithmetic, 9.6 ms for gather; 6 kv_head do not divide by 4",
        ),
        # Keys that are too many are not gathered, however soon; a ring that cannot be is none.
        (
            6, 0.5, dict(gather=0.001, ring=0.0046),
            "ring: a layer waits 4.6 ms for a sequence by arithmetic; 6 kv_head do not divide by 4; gathered keys and "
            "values of a sequence and layer are 0.188 GiB, more than 5% of 0.5 GiB",
        ),
        (
            6, 31.25, dict(gather=0.0096),
            "gather: a layer waits 9.6 ms for a sequence by arithmetic; 6 kv_head do not divide by 4",
        ),
    ],
)  # fmt: skip
def test_what_is_waited_for_least_is_chosen(kv_heads, hbm, seconds, text):
    given = dict(kv_heads=kv_heads, head_size=128, positions=65_536, heads_ways=1, position_ways=4)
    assert str(choose(**given, hbm_bytes=int(hbm * GIB), seconds=seconds)) == text


def test_prices_are_asked_for_what_can_be():
    """By the mapping that each word stands for, on the mesh that there is."""
    asked = []

    def prices(sizes, mappings, mesh):
        asked.append((sizes["kv_head"], mappings.attention, mesh.shape["context"]))
        return {0: 2.0, 1: 3.0, 2: 1.0}[len(asked) - 1]

    config = MeshConfig(axes={"context": 4}, compute_mapping=CUT, attention_mapping="auto")
    found = resolve(config, MODEL, devices=8, prices=prices)
    heads = AxisMapping({"position": None, "kv_head": ["model", "context"]})
    assert asked == [(4, AxisMapping(), 4), (4, heads, 4), (4, AxisMapping({"key_position": "context"}), 4)]
    assert found.method == "ring"
    asked.clear()
    assert resolve(replace(config, axes={"context": 8}), MODEL, devices=8, prices=prices).method == "gather"
    assert len(asked) == 2
    # Which is chosen is not asked where somebody said it.
    asked.clear()
    assert resolve(replace(config, attention_mapping="gather"), MODEL, devices=8, prices=prices).method == "gather"
    assert not asked


def test_between_slices_auto_is_a_ring():
    config = MeshConfig(dcn_axes={"context": 2}, compute_mapping=CUT, attention_mapping="auto", allow_dcn=True)
    found = resolve(config, MODEL, devices=8, granules=2)
    assert found.method == "ring"
    assert any(note.startswith("attention_mapping auto is ring:") and "slices" in note for note in found.notes)


@pytest.mark.parametrize(
    ("written", "exchange", "mapping", "zigzag"),
    [
        ({}, "gather", {}, False),
        ("gather", "gather", {}, True),
        ("heads", "heads", {"position": None, "kv_head": ["model", "context"]}, False),
        ({"position": None, "kv_head": ["model", "context"]}, "heads", None, False),
        ("ring", "ring", {"key_position": "context"}, True),
        ("auto", "heads", {"position": None, "kv_head": ["model", "context"]}, False),
    ],
)
def test_words_are_mappings(written, exchange, mapping, zigzag):
    found = resolved(written)
    assert found.method == exchange
    assert found.mappings.attention == AxisMapping(written if mapping is None else mapping)
    assert found.mappings.zigzag == (("position",) if zigzag else ())
    assert found.query_ways == (1 if exchange == "heads" else 4)


def test_a_ring_of_heads_is_two_mesh_axes():
    spelled = {"position": "ring", "key_position": "ring", "kv_head": ["model", "context"]}
    found = resolved(spelled, ring=2, data=1, compute={"position": ["ring", "context"]})
    assert (found.method, found.position_ways, found.query_ways) == ("ring × heads", 8, 2)


def test_no_attention_mapping_is_as_before():
    found = resolved({})
    assert (found.mappings.attention, found.mappings.zigzag, found.notes) == (AxisMapping(), (), ())


def test_natural_order_says_what_it_costs():
    (note,) = resolved("ring", order="natural").notes
    assert note.startswith(
        "attention exchanges by ring, positions in natural order: the busiest device has 1.75 × the mean"
    )
    assert [busiest_share(n, "natural") for n in (1, 8, 64)] == [1.0, 1.875, 127 / 64]
    assert busiest_share(64, "zigzag") == 1.0


def test_nothing_to_exchange_is_said():
    found = resolved("auto", compute={}, context=1)
    assert found.method is None
    assert any("attention_mapping and position_order have no effect" in note for note in found.notes)


def test_whole_positions_have_no_method():
    mesh = MeshSpec.of(data=8, context=1)
    assert method_from_mapping(AxisMapping({"key_position": "context"}), AxisMapping(CUT), mesh) is None


@pytest.mark.parametrize(
    ("options", "key", "values", "suggestion"),
    [
        (
            dict(attention="heads", context=8, data=1),
            "attention_mapping: kv_head → [model, context]", ["4 kv_head", "8"],
            ["1, 2, 4", "{position: null, q_heads_per_group: …}", "gather or ring"],
        ),
        (
            dict(attention={"key_position": "context"}, compute={}),
            "attention_mapping: key_position → context", ["position is not mapped"],
            ["compute_mapping: {position: context}"],
        ),
        (
            dict(attention={"key_position": "data"}),
            "attention_mapping: key_position → data", ["position → context"], ["compute_mapping: {position: data}"],
        ),
        (
            dict(attention={"kv_head": "context"}),
            "attention_mapping: kv_head and position", ["mesh axis context"], ["{position: null}"],
        ),
        (
            dict(attention="ring", compute={"position": "context", "key_position": "context"}),
            "compute mapping: key_position → context", [], ["attention_mapping: {key_position: context}"],
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_key_its_values_and_a_legal_one(options, key, values, suggestion):
    with pytest.raises(ShardingError) as error:
        resolved(options.pop("attention"), **options)
    problem, _, proposed = str(error.value).partition("\n  → ")
    assert problem.startswith(f"trainer.mesh: {key}") and all(value in problem for value in values)
    assert all(part in proposed for part in suggestion)


def test_one_group_of_heads_is_refused_with_other_mappings():
    """A model with one key/value head."""
    one = ModelAxes(sizes={**MODEL.sizes, "kv_head": 1, "q_heads_per_group": 8}, known=SIZES)
    config = MeshConfig(axes={"context": 4}, compute_mapping=CUT, attention_mapping="heads")
    with pytest.raises(ShardingError) as error:
        resolve(config, one, devices=8)
    problem, _, suggestion = str(error.value).partition("\n  → ")
    assert problem.startswith("trainer.mesh: attention_mapping: kv_head → [model, context]: 1 kv_head")
    assert "8 query heads of a group" in suggestion and "{position: null, q_heads_per_group: …}" in suggestion


def over_dcn(attention, *, allowed, cut=CUT, granules=2):
    config = MeshConfig(
        axes={"context": 2} if cut != CUT else {},
        dcn_axes={"far" if cut != CUT else "context": granules},
        compute_mapping=cut,
        attention_mapping=attention,
        allow_dcn=allowed,
    )
    return resolve(config, MODEL, devices=8, granules=granules)


@pytest.mark.parametrize("attention", [{}, "gather", "heads", "ring", "auto"])
def test_positions_between_slices_have_to_be_allowed(attention):
    with pytest.raises(ShardingError) as error:
        over_dcn(attention, allowed=False)
    problem, _, suggestion = str(error.value).partition("\n  → ")
    assert problem.startswith("trainer.mesh: compute mapping: position → context crosses slices (context)")
    assert "axes: {context: 2} in place of dcn_axes: {context: 2}" in suggestion
    assert "trainer.mesh.allow_dcn: true, with attention_mapping: ring" in suggestion
    # As it says.
    inside = MeshConfig(axes={"context": 2}, compute_mapping=CUT, attention_mapping=attention)
    assert resolve(inside, MODEL, devices=8, granules=2).spec.dcn == ("replica_dcn",)


def test_of_positions_that_are_partly_between_slices_the_part_inside_is_proposed():
    with pytest.raises(ShardingError) as error:
        over_dcn("ring", allowed=False, cut={"position": ["far", "context"]})
    assert "position → [far, context] crosses slices (far)" in str(error.value)
    assert "compute_mapping: {position: context}" in str(error.value)


def test_between_slices_only_a_ring_exchanges():
    for attention in ("gather", "heads", {}):
        with pytest.raises(ShardingError) as error:
            over_dcn(attention, allowed=True)
        problem, _, suggestion = str(error.value).partition("\n  → ")
        assert problem.startswith("trainer.mesh: attention_mapping: position → context crosses slices (context)")
        assert suggestion.startswith("attention_mapping: ring")
        assert "axes: {context: 2} in place of dcn_axes: {context: 2}" in suggestion
    (note,) = [note for note in over_dcn("ring", allowed=True).notes if "DCN" in note]
    assert "over context" in note and "trainer.mesh.allow_dcn" in note


def test_an_axis_between_slices_of_one_piece_crosses_nothing():
    """A preset with an axis between slices may be run on one."""
    found = over_dcn("ring", allowed=False, cut={"position": ["far", "context"]}, granules=1)
    assert found.position_ways == 2 and not any("DCN" in note for note in found.notes)


@pytest.mark.parametrize(
    ("residual", "note"),
    [
        (
            "model",
            "residual_mapping: position → model omits context, which shards it in the compute mapping: every block "
            "gathers over it; [context, model] does not",
        ),
        (["context", "model"], None),
        ("context", None),
    ],
)
def test_a_residual_stream_that_is_cut_less_than_positions_is_noted(residual, note):
    config = MeshConfig(
        axes={"context": 4, "model": 2},
        compute_mapping=CUT,
        attention_mapping="ring",
        residual_mapping={"position": residual},
    )
    notes = resolve(config, MODEL, devices=8).notes
    assert [each for each in notes if "residual" in each] == ([] if note is None else [note])


@pytest.mark.parametrize(("order", "unit", "near"), [("zigzag", 8, "64 or 72"), ("natural", 4, "64 or 68")])
def test_positions_that_do_not_divide(order, unit, near):
    model = ModelAxes(sizes={**MODEL.sizes, "position": 66}, known=SIZES)
    config = MeshConfig(axes={"context": 4}, compute_mapping=CUT, attention_mapping="ring", position_order=order)
    with pytest.raises(ShardingError, match=rf"66 positions % {unit} = 2\n  → make it {near} positions"):
        resolve(config, model, devices=8)


def test_a_word_that_is_none():
    with pytest.raises(ValueError, match="attention_mapping"):
        parse_text(MeshConfig, "attention_mapping: rign")
    assert parse_text(MeshConfig, "attention_mapping: ring").attention_mapping == "ring"
    assert parse_text(MeshConfig, "attention_mapping: {position: null}").attention_mapping == {"position": None}
