"""Endings of one context behind a trunk that is computed once: each is as likely as transformers finds it alone.

Windows are shorter than the trunks, and endings lie further from them in a row than in their texts.
"""

import jax
import numpy as np
import pytest
from helpers.family_models import describe_folder, make_checkpoint

from haliax_ext.abstract import with_arrays
from levanter.commands.model.eval_prompts import reading_checks, rows_reach
from levanter.commands.model.pretrained import load_pretrained
from levanter.eval.harness.encoding import Query
from levanter.eval.harness.packing import RowShape, row_shapes
from levanter.eval.harness.scoring import Scorer, query_scores, score_programs

# Two frameworks compute the same with the same weights: what is compiled is compiled as in a run.
pytestmark = pytest.mark.optimized

FAMILIES = ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gpt_neox", "olmo3"))]
FAMILIES += [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "mixtral", "phi3")]


def price(shape: RowShape) -> float:
    return shape.rows * shape.length


def asked_of(vocab: int) -> list[Query]:
    """Contexts of 30 tokens with four endings of one to six; one ending begins another."""
    dice, found = np.random.default_rng(0), []
    for _ in range(3):
        context = dice.integers(3, vocab, 30)
        endings = [dice.integers(3, vocab, size) for size in (1, 3, 6)]
        for ending in (*endings, np.append(endings[1], 9)):
            whole = np.concatenate([context, ending]).astype(np.int32)
            found.append(Query(inputs=whole[:-1], targets=ending.astype(np.int32)))
    return found


def by_torch(model, questions: list[Query]) -> np.ndarray:
    import torch

    found = []
    for each in questions:
        with torch.no_grad():
            logits = model(torch.from_numpy(each.inputs.astype(np.int64))[None]).logits[0].double()
        likely = logits.log_softmax(-1)[-len(each.targets) :]
        found.append(likely.gather(-1, torch.from_numpy(each.targets.astype(np.int64))[:, None]).sum().item())
    return np.asarray(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_endings_behind_a_trunk_are_as_likely_as_alone(name: str, tmp_path):
    model = make_checkpoint(name, tmp_path)
    described = describe_folder(tmp_path, positions=96)
    longest, branches = rows_reach(described.config, described.resolved, "cpu", length=96, tokens=256)
    assert branches and longest == 192 > described.config.max_seq_len == 128
    mesh = described.resolved.spec.build(jax.devices()[: described.resolved.spec.size])
    programs = score_programs(
        described.abstract,
        row_shapes(longest, tokens=256, ways=described.resolved.batch_ways, branches=branches),
        mappings=described.resolved.mappings,
        placement=described.sharding,
        batch_axis=described.resolved.batch_axis,
    )
    weights = with_arrays(described.abstract, load_pretrained(described, mesh, show=False).arrays)
    scorer = Scorer(programs=programs, mesh=mesh, model=weights, cost=price)
    questions = asked_of(256)
    table = scorer.table(questions)
    assert any(len(parts) > 2 for parts in table.items.segment_sizes)
    assert sum(len(each) for each in table.items.inputs) < 0.5 * table.tokens
    found = query_scores(table, len(questions), scorer.run(table))
    np.testing.assert_allclose(found.logprobs, by_torch(model, questions), atol=2e-4, rtol=1e-5)


def test_rows_are_no_longer_than_contexts_where_their_length_is_read(tmp_path):
    """Rotary embeddings of some kinds depend on how long the whole sequence is."""
    make_checkpoint("qwen3_dynamic", tmp_path)
    described = describe_folder(tmp_path, positions=48)
    assert rows_reach(described.config, described.resolved, "cpu", length=48, tokens=128) == (48, True)
    assert [each.status for each in reading_checks(described.config, 48)] == ["note"]
    assert reading_checks(described.config, 16) == [], "of its own context, all is read alike"
    assert rows_reach(described.config, described.resolved, "tpu", length=48, tokens=128) == (48, False)
