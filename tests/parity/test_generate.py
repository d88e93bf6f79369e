"""Generated text against `transformers` + torch: every family, through the run's own loader, Programs and engine.

A token is right if it is torch's likeliest given the tokens before it, which makes greedy texts equal; where torch's
two best logits are within a thousandth, either will do. Prompts are longer than a call takes and end anywhere in one,
windows are shorter than the texts, there are more prompts than rows, and texts end at different times.
"""

from functools import cache

import numpy as np
import pytest
from helpers.family_models import ALL_MESHES, ESSENTIAL, VARIANTS, describe_folder, layout, make_checkpoint
from helpers.generation import check_by_scores, check_by_torch, decided, generate, on_devices, planned

LENGTHS = (1, 30, 5, 17, 8, 40, 16, 23, 3, 12, 2, 33, 9, 27, 6, 38, 15, 20, 4, 44)
NEW, ROOM = 20, 64
PROMPTS = [np.random.default_rng(n).integers(3, 250, length).tolist() for n, length in enumerate(LENGTHS)]
GROWING = {
    "qwen3_dynamic": "its rotary base grows with the text; here it is that of the whole room from the beginning",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of checkpoints by variant, with the torch model; each is made once."""

    @cache
    def made(name: str):
        folder = tmp_path_factory.mktemp(name)
        return folder, make_checkpoint(name, folder)

    return made


def check(folders, name: str, mesh: str, *, scored: bool = False, **options):
    folder, theirs = folders(name)
    # As a run on CPUs has it: weights with their contracted axes first, and the cache read by blocks.
    described = describe_folder(folder, mesh=layout(name, mesh), positions=ROOM, work="generate")
    usual = {"rows": 8, "max_seq_len": ROOM, "prefill": [(1, 16)], "cache_block": 16}
    programs = planned(described, **(usual | options))
    found = generate(programs, *on_devices(described), PROMPTS, new=NEW)
    assert [len(written.tokens) for written in found] == [NEW] * len(PROMPTS)
    assert len({tuple(written.tokens) for written in found}) > 4, "texts must differ for this to say anything"
    decided([check_by_torch(theirs, prompt, written) for prompt, written in zip(PROMPTS, found, strict=True)])
    if scored:
        check_by_scores(described, PROMPTS, found)


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        # Two runs of layers, windows, two rotary tables; then learned positions; experts.
        pytest.param("gemma3", "group", {"allocation": "paged"}, marks=pytest.mark.slow),
        ("gpt2", "2x4", {"steps": 4}),
        ("mixtral_window", "2x4", {}),
    ],
)
def test_greedy_text_is_that_of_transformers(name, mesh, options, folders):
    check(folders, name, mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("allocation", ["fixed", "paged"])
@pytest.mark.parametrize("mesh", ALL_MESHES)
@pytest.mark.parametrize("name", ESSENTIAL)
def test_every_family_on_every_mesh(name, mesh, allocation, folders):
    check(folders, name, mesh, allocation=allocation, scored=mesh == "2x4" and allocation == "fixed")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ESSENTIAL and name not in GROWING])
def test_every_variant(name, folders):
    check(folders, name, "2x4", allocation="paged", steps=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"prefill": [(1, 64)]},
        {"prefill": [(1, 8)]},
        {"prefill": [(1, 48)], "steps": 8},
        {"prefill": [(2, 4), (1, 24)], "steps": 3},
        {"rows": 2},
        # Two rows a shard, and pages for little more than one: rows give way.
        {"rows": 4, "allocation": "paged", "page_size": 4, "pages": 40},
        {"rows": 16, "allocation": "paged", "page_size": 64},
    ],
    ids=str,
)
def test_the_text_is_the_same_in_any_parts_rows_pages_and_steps(options, folders):
    check(folders, "qwen3", "2x4", **options)
