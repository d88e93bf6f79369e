"""The evaluation harness asked by ours and by lm_eval's HFLM: the same log-probabilities, flags, texts and metrics."""

from dataclasses import replace

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: the extra `harness`")

import numpy as np
import transformers
from helpers.harness import CPU8, by_hflm, by_ours, harness_config, tiny_gpt2, tiny_llama
from tokenizers import Tokenizer, normalizers

from levanter.commands.harness.eval_harness import describe
from levanter.eval.harness.config import HarnessTaskConfig

# Two frameworks compute the same with the same weights: what is compiled is compiled as in a run.
pytestmark = [pytest.mark.optimized, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SCORED = "made_letters,made_endings,made_boolean,made_cloze,made_texts"
MODELS = {"llama": tiny_llama, "without_bos": lambda folder: tiny_llama(folder, bos=False), "gpt2": tiny_gpt2}
SLOW = ("without_bos", "gpt2")


@pytest.fixture(scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def model(request, tmp_path_factory):
    """A folder, and what transformers makes of it."""
    folder = MODELS[request.param](tmp_path_factory.mktemp("models") / request.param)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    return folder, theirs.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def compared(ours, theirs, *, tolerance: float = 1e-3) -> int:
    """Compares every answer and metric; how many answers there were."""
    count = 0
    assert ours.samples.keys() == theirs["samples"].keys()
    for task, mine in ours.samples.items():
        own, other = ({each["doc_id"]: each for each in some} for some in (mine, theirs["samples"][task]))
        assert own.keys() == other.keys() and own
        for doc, sample in own.items():
            assert sample["arguments"] == other[doc]["arguments"], task
            for (got,), (wanted,) in zip(sample["resps"], other[doc]["resps"], strict=True):
                count += 1
                if isinstance(wanted, str):
                    assert got == wanted, (task, doc)
                elif isinstance(wanted, tuple):
                    assert got[0] == pytest.approx(wanted[0], abs=tolerance), (task, doc)
                    assert got[1] == wanted[1], (task, doc)
                else:
                    assert got == pytest.approx(wanted, rel=1e-3), (task, doc)
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "," in name:
                assert ours.results["results"][task][name] == pytest.approx(value, rel=1e-3), (task, name)
    return count


def test_answers_texts_and_metrics_are_hflms(model):
    folder, theirs, tokenizer = model
    ours, plan = by_ours(harness_config(folder, f"{SCORED},made_sums", limit=8))
    judge = by_hflm(theirs, tokenizer, f"{SCORED},made_sums", limit=8)
    assert compared(ours, judge) == 8 * (4 + 4 + 2 + 1 + 1 + 1)
    assert any(sample["resps"][0][0] for sample in ours.samples["made_sums"])
    # Some clozes are longer than the context, and some texts too: the beginning is cut, and there are windows.
    assert ours.results["levanter"]["cut_requests"] > 0
    names = {program.name for program in plan.computing if program.name.startswith("score_")}
    assert len(names) <= 6 and {name.endswith("_all") for name in names} == {True, False}


def test_no_bits_per_byte_where_ids_do_not_keep_the_text(tmp_path):
    folder = tiny_llama(tmp_path / "model")
    built = Tokenizer.from_file(str(folder / "tokenizer.json"))
    built.normalizer = normalizers.Lowercase()
    built.save(str(folder / "tokenizer.json"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    judge = by_hflm(theirs.eval(), transformers.AutoTokenizer.from_pretrained(folder), "made_texts", limit=3)
    ours, _ = by_ours(harness_config(folder, "made_texts", limit=3))
    metrics, wanted = ours.results["results"]["made_texts"], judge["results"]["made_texts"]
    assert metrics["word_perplexity,none"] == pytest.approx(wanted["word_perplexity,none"], rel=1e-3)
    assert not [name for name in metrics if "byte" in name] and "bits_per_byte,none" in wanted
    assert all("byte" not in str(sample["metrics"]) for sample in ours.samples["made_texts"])
    assert (
        "do not keep them; the first is made_texts, document"
        in ours.results["levanter"]["no_bits_per_byte"]["made_texts"]
    )


@pytest.mark.slow
def test_solved_documents_and_conversations_are_hflms(model):
    folder, theirs, tokenizer = model
    if tokenizer.chat_template is None:
        pytest.skip("this tokenizer has no chat template")
    block = {"task_spec": [HarnessTaskConfig(task="made_letters", num_fewshot=1)], "apply_chat_template": True}
    config = harness_config(folder, "", limit=5, **block)
    ours, _ = by_ours(config)
    judge = by_hflm(theirs, tokenizer, "made_letters", limit=5, num_fewshot=1, apply_chat_template=True)
    assert compared(ours, judge) == 5 * 4
    assert "[assistant]" in ours.samples["made_letters"][0]["arguments"][0][0]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2, 7, 15, 40])
def test_few_documents_take_no_more_tokens_than_hflm_has(model, limit: int):
    """Padding included, batches of 8 there."""
    folder, theirs, tokenizer = model
    one = replace(CPU8, devices=1)
    for task in SCORED.split(","):
        plan = describe(harness_config(folder, task, limit=limit), one)
        ours = sum((each.executions or 0) * each.tokens for each in plan.workloads)
        forwarded = []
        by_hflm(theirs, tokenizer, task, limit=limit, forwarded=forwarded)
        assert 0 < ours <= sum(forwarded), task


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two minutes of two cores, if they have nothing else to do
def test_smollm2_answers_as_hflm(tmp_path):
    from helpers.torch_smollm2 import MODEL, torch_smollm2

    from levanter.compat.hf.tokenizer import as_transformers
    from levanter.compat.open import open_checkpoint

    tokenizer = as_transformers(open_checkpoint(MODEL).tokenizer())
    config = harness_config(MODEL, f"{SCORED},made_sums", limit=15, max_length=256)
    ours, plan = by_ours(config)
    forwarded = []
    asked = {"limit": 15, "max_length": 256, "forwarded": forwarded}
    theirs = by_hflm(torch_smollm2(), tokenizer, f"{SCORED},made_sums", **asked)
    scored = [each for each in plan.workloads if each.program.startswith("score_")]
    assert 0 < sum((each.executions or 0) * each.tokens for each in scored) <= sum(forwarded)
    assert compared(ours, theirs) == 15 * (4 + 4 + 2 + 1 + 1 + 1)
    accuracies = [ours.results["results"][task]["acc,none"] for task in ("made_letters", "made_endings")]
    assert np.mean(accuracies) > 0.5
