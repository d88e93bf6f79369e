"""Two runs on the same documents: intervals by brute force, and by what is known of coins."""

import json
import math

import numpy as np
import pytest

from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.results import Sample, parse_samples, read_run
from levanter.eval.harness.significance import compare, differences_table


def sample(n: int, filter: str = "none", hash: str | None = None, **metrics) -> Sample:
    return Sample(
        doc_id=n,
        doc_hash=hash or f"h{n}",
        filter=filter,
        target="0",
        arguments=(("q", " a"), ("q", " b")),
        answers=((-1.0, True), (-2.0, False)),
        metrics=metrics,
    )


def accuracies(values) -> list[Sample]:
    return [sample(n, acc=float(value)) for n, value in enumerate(values)]


def test_the_interval_is_that_of_a_mean_of_pairs():
    """By the normal approximation of the mean of differences, which 400 documents are enough for."""
    dice = np.random.default_rng(0)
    ours = dice.random(400) < 0.7
    theirs = np.where(dice.random(400) < 0.8, ours, dice.random(400) < 0.1)
    (found,) = compare({"a": accuracies(ours)}, {"a": accuracies(theirs)})
    differences = ours.astype(float) - theirs.astype(float)
    error = differences.std(ddof=1) / math.sqrt(400)
    assert found.ours - found.theirs == pytest.approx(differences.mean())
    assert found.low == pytest.approx(differences.mean() - 1.96 * error, abs=0.004)
    assert found.high == pytest.approx(differences.mean() + 1.96 * error, abs=0.004)
    assert found.verdict == "better" and found.p < 0.01 and found.documents == 400
    # Two intervals of unpaired runs would be wider.
    assert found.high - found.low < 2 * 1.96 * math.sqrt(ours.var() / 400 + theirs.var() / 400)


def test_a_run_beside_itself_is_equal_and_coins_are_noise():
    dice = np.random.default_rng(1)
    coins = [dice.random(60) < 0.5 for _ in range(2)]
    (same,) = compare({"a": accuracies(coins[0])}, {"a": accuracies(coins[0])})
    assert same.verdict == "equal" and same.p == 1.0
    verdicts = []
    for seed in range(40):
        dice = np.random.default_rng(seed)
        one, other = (accuracies(dice.random(60) < 0.5) for _ in range(2))
        verdicts += [each.verdict for each in compare({"a": one}, {"a": other})]
    assert verdicts.count("noise") >= 34


def test_perplexities_are_ratios_of_sums_and_less_is_better():
    dice = np.random.default_rng(2)
    values = [(-float(dice.random() * 50 + 20), float(dice.integers(5, 30))) for _ in range(50)]
    ours = [sample(n, word_perplexity=(0.9 * a, b), bits_per_byte=(0.9 * a, b)) for n, (a, b) in enumerate(values)]
    theirs = [sample(n, word_perplexity=each, bits_per_byte=each) for n, each in enumerate(values)]
    bits, words = compare({"a": ours}, {"a": theirs})
    a, b = np.asarray(values).sum(axis=0)
    assert words.theirs == pytest.approx(math.exp(-a / b)) and words.ours == pytest.approx(math.exp(-0.9 * a / b))
    assert bits.theirs == pytest.approx(-a / b / math.log(2))
    assert {words.verdict, bits.verdict} == {"better"}
    assert "a     bits_per_byte" in differences_table([bits, words])


def test_only_the_same_documents_are_compared():
    ours, theirs = accuracies([1, 0, 1]), [sample(n, hash=f"other{n}", acc=1.0) for n in range(3)]
    with pytest.raises(ValueError, match="the other run has different documents"):
        compare({"a": ours}, {"a": theirs})
    with pytest.raises(ValueError, match="no task and document in common: here a; there b"):
        compare({"a": ours}, {"b": theirs})
    # More documents there than here, and another filter.
    more = [*accuracies([1, 1, 1, 0, 0]), sample(0, filter="number", acc=0.0)]
    (found,) = compare({"a": ours}, {"a": more})
    assert found.documents == 3


def test_probabilities_of_choices():
    assert sample(0).probabilities == pytest.approx((math.e / (1 + math.e), 1 / (1 + math.e)))
    assert sample(0, acc=1.0).is_right is True and sample(0).is_right is None


def test_a_run_is_read_from_its_files(tmp_path):
    line = {
        "doc_id": 3, "doc_hash": "x", "filter": "none", "target": "1", "metrics": ["acc"], "acc": 1.0,
        "arguments": {"gen_args_0": {"arg_0": "q", "arg_1": " a"}}, "resps": [[["-1.5", "True"]]],
    }  # fmt: skip
    (tmp_path / "results_1.json").write_text(json.dumps({"results": {"a": {"acc,none": 1.0}}}))
    (tmp_path / "samples_a_1.jsonl").write_text(json.dumps(line) + "\n")
    _, found = read_run(str(tmp_path / "results_1.json"))
    in_memory = {**line, "arguments": [("q", " a")], "resps": [[(-1.5, True)]]}
    assert found == {"a": parse_samples([in_memory])} and found["a"][0].answers == ((-1.5, True),)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"results": {}}', '{"results": {"a": {}}}'])
def test_what_is_no_run_is_said(tmp_path, content):
    path = tmp_path / "results_1.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"against: .*results_1\.json: "):
        read_run(str(path))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("{", "line 1: not a sample (JSONDecodeError"),
        ("\n\n[]", "line 3: not a sample (TypeError"),
        ('{"doc_id": 1, "arguments": []}', "line 1: not a sample (KeyError: 'doc_hash')"),
        ('{"arguments": 3}', "line 1: not a sample (KeyError: 'doc_id')"),
    ],
)
def test_a_damaged_sample_is_said_with_its_line(tmp_path, lines: str, said: str):
    (tmp_path / "results_1.json").write_text(json.dumps({"results": {"a": {}}}))
    (tmp_path / "samples_a_1.jsonl").write_text(lines)
    with pytest.raises(HarnessError) as told:
        read_run(str(tmp_path / "results_1.json"))
    assert f"samples_a_1.jsonl, {said}" in str(told.value)
