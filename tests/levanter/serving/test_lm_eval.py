"""lm-eval's `local-completions` against a server: log-probabilities and choices are torch's of the same weights.

lm-eval brings a hundred packages, so it has an extra of its own: `pip install -e ".[clients]"` for this test.
"""

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

QUESTIONS = [
    ("the cat sat on", [" the mat", " a hat", " x", "\n\n\n"]),
    ("naïve café 12345 —", [" 日本語", " 🎉", "345"]),
    ("def f(x):\n    return", [" x + 1", " x", " didn't", " it?"]),
    ("a", [" b", "a"]),
]


@pytest.fixture(scope="module")
def harness(server):
    return LocalCompletionsAPI(
        model="tiny", base_url=f"{server.url}/v1/completions", num_concurrent=2, max_length=63, batch_size=1
    )


@pytest.fixture(scope="module")
def torch_model(model):
    return AutoModelForCausalLM.from_pretrained(
        model.plan.work.server.hf_checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def by_torch(torch_model, prompt: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The sum of a continuation's log-probabilities, and whether it is the greedy one."""
    ids = prompt + continuation
    with torch.no_grad():
        found = torch_model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    rows = found[len(prompt) - 1 : len(ids) - 1]
    return (
        float(rows[np.arange(len(continuation)), continuation].sum()),
        bool((rows.argmax(-1) == continuation).all()),
    )


def test_the_server_tells_lm_eval_its_tokenizer(harness):
    assert harness.tokenizer_backend == "remote"
    assert harness.tok_encode("the cat sat")


def test_log_probabilities_and_choices_are_torchs(harness, torch_model):
    """Of each answer to each question; who answers by the likeliest one answers the same."""
    asked = [
        Instance(request_type="loglikelihood", doc={}, arguments=(question, answer), idx=n)
        for question, answers in QUESTIONS
        for n, answer in enumerate(answers)
    ]
    found = harness.loglikelihood(asked, disable_tqdm=True)
    expected = []
    for question, answers in QUESTIONS:
        for answer in answers:
            prompt, continuation = harness._encode_pair(question, answer)
            expected.append(by_torch(torch_model, list(prompt), list(continuation)))
    np.testing.assert_allclose([each[0] for each in found], [each[0] for each in expected], atol=2e-4, rtol=0)
    assert [each[1] for each in found] == [each[1] for each in expected]
    at = 0
    for _, answers in QUESTIONS:
        ours, theirs = found[at : at + len(answers)], expected[at : at + len(answers)]
        assert np.argmax([each[0] for each in ours]) == np.argmax([each[0] for each in theirs])
        at += len(answers)


def test_greedy_text_until_a_stop(harness, model, torch_model):
    options = {"until": ["z"], "max_gen_toks": 12, "temperature": 0}
    asked = [
        Instance(request_type="generate_until", doc={}, arguments=(question, dict(options)), idx=0)
        for question, _ in QUESTIONS
    ]
    tokenizer = Tokenizer.from_file(f"{model.plan.work.server.hf_checkpoint}/tokenizer.json")
    texts = harness.generate_until(asked, disable_tqdm=True)
    for (question, _), text in zip(QUESTIONS, texts, strict=True):
        prompt = list(harness.tok_encode(question))
        with torch.no_grad():
            written = torch_model.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=2
            )[0, len(prompt) :].tolist()
        if written[-1] == 2:
            written.pop()
        assert text == tokenizer.decode(written).split("z")[0]
