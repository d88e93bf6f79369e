"""Merged exports of every family: `transformers` loads them, and their logits are those of base and adapter together.

`tests/levanter/commands/export/test_merging.py` has two families in `make test`, and what the numbers are.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.adapted_models import TOKENS, loaded, logits
from helpers.family_models import ESSENTIAL, make_checkpoint

from haliax_ext.abstract import leaves, with_arrays
from levanter.commands.export.config import ConvertLmConfig
from levanter.commands.export.export_lm_to_hf import describe, execute
from levanter.compat.hf.peft import plan_peft, write_peft
from levanter.config import load
from levanter.models.adapters import Adapters, LoraConfig, find_targets, target_groups
from levanter.models.adapters.whole import find_whole, select_leaves
from levanter.runplan import Session, Target

pytestmark = pytest.mark.slow
HOST = Target(name="local", platform="cpu", kind="host", devices=1)


@pytest.mark.parametrize("name", ESSENTIAL)
def test_transformers_has_the_logits_of_base_and_adapter(name, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    make_checkpoint(name, tmp_path / "base")
    _, rules, model = loaded(tmp_path / "base")
    every = target_groups(model, rules)
    saved = (
        ["wte", "ln_f"] if name == "gpt2" else ["embed_in"] if name == "gpt_neox" else ["embed_tokens", "model.norm"]
    )
    config = LoraConfig(r=3, alpha=6, modules_to_save=saved)
    targets = find_targets(every, config)
    whole = select_leaves(model, find_whole(leaves(model), rules, config, targets))
    tree = Adapters.init(targets, config, key=jax.random.PRNGKey(0), whole=whole)
    rng = np.random.default_rng(3)
    arrays = {leaf.path: (0.2 * rng.standard_normal(leaf.shape)).astype(np.float32) for leaf in leaves(tree)}
    adapters = with_arrays(tree, arrays)
    plan = plan_peft(targets, every, rules, leaves(adapters), use_rslora=False, base=None)
    write_peft(plan, arrays, tmp_path / "adapter")
    expected = logits(adapters.bound_to(model))
    assert np.abs(expected - logits(model)).max() > 0.1, "the adapter must matter for this to say anything"
    named = {"hf_checkpoint": "base", "adapter_path": "adapter", "output_dir": "out"}
    words = [word for key, value in named.items() for word in (f"--{key}", str(tmp_path / value))]
    described = describe(load(ConvertLmConfig, [*words, "--save_tokenizer", "false"]), HOST).check()
    folder = Path(execute(described, None, Session(show=False)))
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    with torch.no_grad():
        found = theirs.eval()(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)
