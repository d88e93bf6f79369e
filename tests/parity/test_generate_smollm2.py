"""Text of SmolLM2-135M, read from a GGUF file, against torch: 128 tokens behind each of 20 prompts of 1 to 900 tokens.

Torch gets its weights by another way than ours; see `helpers.torch_smollm2`. Ours are laid out, and the cache is read,
as a run on CPUs has it; a prompt is taken by the calls that such a run has by default, or by larger ones.
"""

import numpy as np
import pytest
from helpers.generation import check_by_scores, check_by_torch, decided, generate, on_devices, planned
from helpers.torch_smollm2 import MODEL, torch_smollm2

from levanter.commands.evaluate.eval_lm import EvalLmConfig
from levanter.commands.model.generation import CPU_BLOCK
from levanter.commands.model.pretrained import ModelChoice, describe_pretrained
from levanter.compat.open import open_checkpoint
from levanter.config import load
from levanter.data import python_docs_text
from levanter.inference.config import InferenceConfig
from levanter.runplan import Target

pytestmark = [pytest.mark.slow, pytest.mark.optimized, pytest.mark.timeout(3600)]

LONGEST, NEW, ROWS = 900, 128, 8
ROOM = LONGEST + NEW
LENGTHS = [round(length) for length in np.linspace(1, LONGEST, 20)]


def described():
    words = ["--hf_checkpoint", MODEL, "--trainer.mp", "f32", "--trainer.mesh", '{"axes": {"data": 1, "model": 1}}']
    config = load(EvalLmConfig, words)
    choice = ModelChoice(reference=config.reference, model=config.model, tokenizer=None, trainer=config.trainer)
    one = Target(name="local", platform="cpu", kind="cpu", devices=1)
    return describe_pretrained(choice, one, batch=lambda _: 20, positions=ROOM, work="generate")


def prompts() -> list[list[int]]:
    """Pieces of prose and code from one text, each from another place."""
    tokenizer = open_checkpoint(MODEL).tokenizer()
    ids = tokenizer.encode_batch([python_docs_text(100_000)])[0].tolist()
    starts = [n * (len(ids) - LONGEST) // len(LENGTHS) for n in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.mark.parametrize(
    ("allocation", "prefill"),
    [("fixed", InferenceConfig().prefill_calls(ROWS, ROOM, platform="cpu")), ("paged", ((1, 256), (4, 64)))],
)
def test_every_text_is_that_of_torch(allocation, prefill):
    model, given = described(), prompts()
    how = {"rows": ROWS, "max_seq_len": ROOM, "page_size": 64, "cache_block": CPU_BLOCK}
    programs = planned(model, prefill=prefill, allocation=allocation, **how)
    found = generate(programs, *on_devices(model), given, new=NEW)
    assert [len(written.tokens) for written in found] == [NEW] * len(given)
    theirs = torch_smollm2()
    decided([check_by_torch(theirs, prompt, written) for prompt, written in zip(given, found, strict=True)])
    if allocation == "fixed":
        check_by_scores(model, given[::4], found[::4])
