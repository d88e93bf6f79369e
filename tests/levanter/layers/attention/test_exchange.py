"""Positions on many devices look at each other as on one: every exchange, order and mask, every leaf's gradient."""

import dataclasses
import itertools
from functools import cache

import jax
import numpy as np
import pytest
from helpers.long_context import (
    EXCHANGES,
    MASKS,
    POSITIONS,
    config,
    documents_alone_and_packed,
    mappings_of,
    mesh_of,
    program,
    run,
)

from haliax_ext.hlo import read_figures
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec

MESHES = ((1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2))
ORDERS = ("natural", "zigzag")

# Every exchange with all masks at once (window, sinks, bound, documents, a table of positions), every order and
# backend. A mesh of 2 × 2 × 2 and a mask that is causal alone are slow; a ring in natural order is in
# test_order.py, one with all masks in `test_a_document_among_others_is_the_document_alone`.
COVERING = [
    pytest.param((1, 8, 1), "gather", "zigzag", "causal", "reference", marks=pytest.mark.slow),
    ((2, 4, 1), "gather", "zigzag", "everything, packed", "blockwise"),
    ((1, 4, 2), "heads", "natural", "everything, packed", "reference"),
    pytest.param((2, 2, 2), "ring", "natural", "causal", "reference", marks=pytest.mark.slow),
    ((1, 4, 2), "ring × heads", "zigzag", "everything, packed", "reference"),
]


@cache
def on_one_device(mask: str, device: jax.Device):
    model = config(**MASKS[mask], attn_backend="reference")
    return run(model, mask, MeshSpec.of(data=1), Mappings(), [device])


def check(devices, mesh, exchange, order, mask, backend, mappings=None):
    model = config(**MASKS[mask], attn_backend=backend, flash_attention_block_size=8)
    want = on_one_device(mask, devices[0])
    got = run(model, mask, mesh_of(*mesh, exchange), mappings or mappings_of(exchange, order), devices)
    assert abs(got[0] - want[0]) <= 1e-6 * abs(want[0])
    np.testing.assert_allclose(got[1], want[1], atol=2e-5, rtol=0)
    assert np.count_nonzero(want[1]) > 50
    for path, gradient in want[2].items():
        largest = np.abs(gradient).max()
        assert largest > 0, path
        assert np.abs(got[2][path] - gradient).max() <= 2e-5 * largest, path


@pytest.mark.parametrize(("mesh", "exchange", "order", "mask", "backend"), COVERING)
def test_an_exchange_is_one_device(devices, mesh, exchange, order, mask, backend):
    check(devices, mesh, exchange, order, mask, backend)


def document_among_others(devices, mesh, exchange, order, mask, backend):
    """Loss, log-probabilities of the document, every gradient: of it alone on one device, of packed rows on many."""
    alone, packed, where = documents_alone_and_packed()
    model = config(**MASKS[mask], attn_backend=backend, flash_attention_block_size=8)
    want = run(model, mask, MeshSpec.of(data=1), Mappings(), devices[:1], alone)
    got = run(model, mask, mesh_of(*mesh, exchange), mappings_of(exchange, order), devices, packed)
    assert abs(got[0] - want[0]) <= 1e-6 * abs(want[0])
    for row, place in enumerate(where):
        length = place.stop - place.start - 1
        found = got[1][row, place.start : place.stop - 1]
        assert np.count_nonzero(found) == length
        np.testing.assert_allclose(found, want[1][row, :length], atol=2e-5, rtol=0)
    for path, gradient in want[2].items():
        largest = np.abs(gradient).max()
        assert largest > 0, path
        assert np.abs(got[2][path] - gradient).max() <= 2e-5 * largest, path


def test_a_document_among_others_is_the_document_alone(devices):
    document_among_others(devices, (1, 8, 1), "ring", "zigzag", "everything, packed", "blockwise")


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["packed", "everything, packed"])
@pytest.mark.parametrize(
    ("exchange", "order"),
    [each for each in itertools.product(EXCHANGES, ORDERS) if each != ("heads", "zigzag")],
)
def test_a_document_among_others_in_every_exchange(devices, exchange, order, mask):
    document_among_others(devices, (1, 4, 2), exchange, order, mask, "reference")


def test_what_is_exchanged_by_heads_crosses_once(devices):
    """Queries, keys, values and results, and their gradients; not the halves of what is rotated, nor scores."""
    spec = mesh_of(1, 4, 1, "heads")
    one = program(config(attn_backend="reference"), "causal", mappings_of("heads", "natural"))
    text = one.lower(spec.build(devices[:4])).compile().as_text()
    found = [each for each in read_figures(text, spec).collectives if each.kind == "all-to-all"]
    # Forward for the loss and for the scores, once more for the backward pass, and that: float32.
    queries, keys = (2 * 64 * heads * 4 // 4 * 4 for heads in (16, 8))
    assert sum(each.total_bytes for each in found) == 4 * 2 * (queries + keys), found


def test_a_residual_stream_in_more_pieces_than_positions_is_never_whole(devices):
    """Positions over `context` in the computation, over `context` and `model` between blocks: sums are cut over `model`
    alone, and the mesh axis that stays cut is not gathered for it."""
    spec = mesh_of(2, 2, 2, "ring")
    mappings = mappings_of("ring", "zigzag")
    mappings = dataclasses.replace(mappings, residual=AxisMapping({"position": ("ring", "context", "model")}))
    one = program(config(attn_backend="reference"), "causal", mappings)
    found = read_figures(one.lower(spec.build(devices)).compile().as_text(), spec).collectives
    row = POSITIONS * 16 * 4  # bytes of the stream on the devices of a data shard; a weight has half of it at most
    assert not [each for each in found if each.kind == "all-gather" and "context" in each.over and each.bytes >= row]
    over_model = [each for each in found if each.over == "model" and each.bytes >= row // 2]
    assert {each.kind for each in over_model} <= {"all-gather", "all-reduce", "reduce-scatter"} and over_model


@pytest.mark.parametrize("exchange", ["gather", pytest.param("heads", marks=pytest.mark.slow)])
def test_a_residual_stream_in_more_pieces_means_the_same(devices, exchange):
    mask = "everything, packed"
    order = "natural" if exchange == "heads" else "zigzag"
    mappings = mappings_of(exchange, order)
    cut = dataclasses.replace(mappings, residual=AxisMapping({"position": ("ring", "context", "model")}))
    check(devices, (1, 4, 2), exchange, order, mask, "reference", mappings=cut)


@pytest.mark.slow
def test_the_order_is_laid_out_without_a_gather(devices):
    """By slices and concatenations: the lowered Program looks up as much in either order."""
    mesh = mesh_of(1, 4, 1, "ring").build(devices[:4])
    natural, zigzag = (
        program(config(attn_backend="reference"), "packed", mappings_of("ring", order)).lower(mesh).as_text()
        for order in ORDERS
    )
    looked_up = [text.count('"stablehlo.gather"') + text.count("dynamic_gather") for text in (natural, zigzag)]
    assert looked_up[0] == looked_up[1] > 0  # the embedding, and the targets' scores
    assert natural.count("sort") == zigzag.count("sort")


SEEDS = range(8)
"""Weights over which errors of 16 bits are averaged: of one model of 64 positions they differ by a tenth."""


def errors_in_16_bits(devices, spec, mappings, backend="reference") -> tuple[float, float]:
    """Root mean square of what 16 bits are off float32 on one device, over weights of all seeds.

    Of log-probabilities, and of all gradients as shares of the largest entry of their leaf.
    """
    mask = "everything, packed"
    model = config(**MASKS[mask], attn_backend=backend, flash_attention_block_size=8)
    of_scores, of_gradients = [], []
    for seed in SEEDS:
        _, scores, gradients = exact(devices[0], seed)
        found = run(model, mask, spec, mappings, devices, dtype="bfloat16", weights="bfloat16", seed=seed)
        of_scores.append((found[1].astype(np.float32) - scores).ravel())
        of_gradients += [
            ((found[2][path].astype(np.float32) - want) / np.abs(want).max()).ravel()
            for path, want in gradients.items()
        ]
    scores, gradients = (float(np.sqrt(np.mean(np.square(np.concatenate(x))))) for x in (of_scores, of_gradients))
    return scores, gradients


@cache
def exact(device: jax.Device, seed: int):
    """In float32 on one device, with weights that 16 bits hold."""
    mask = "everything, packed"
    model = config(**MASKS[mask], attn_backend="reference")
    return run(model, mask, MeshSpec.of(data=1), Mappings(), [device], weights="bfloat16", seed=seed)


@cache
def errors_of_one_device(device: jax.Device) -> tuple[float, float]:
    """What 16 bits are off there."""
    return errors_in_16_bits([device], MeshSpec.of(data=1), Mappings())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 4, 1), (1, 4, 2)])
@pytest.mark.parametrize(
    ("exchange", "order"),
    [each for each in itertools.product(EXCHANGES, ORDERS) if each != ("heads", "zigzag")],
)
def test_16_bits_are_as_exact_as_on_one_device(devices, exchange, order, mesh):
    """At most 1.1 times the error against float32, though tensor parallelism rounds the pieces of sums once more."""
    one = errors_of_one_device(devices[0])
    assert min(one) > 1e-4, "16 bits are off"
    many = errors_in_16_bits(devices, mesh_of(*mesh, exchange), mappings_of(exchange, order))
    assert all(mine <= 1.1 * theirs for mine, theirs in zip(many, one, strict=True)), (many, one)


TABLE = [
    (mesh, exchange, order, mask)
    for mesh, exchange, order, mask in itertools.product(MESHES, EXCHANGES, ORDERS, MASKS)
    if (exchange, order) != ("heads", "zigzag")
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "exchange", "order", "mask"), TABLE)
def test_exchanges_of_the_whole_table(devices, mesh, exchange, order, mask):
    check(devices, mesh, exchange, order, mask, "reference" if mesh[1] == 4 else "blockwise")
