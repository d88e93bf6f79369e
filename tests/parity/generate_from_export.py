"""Has `transformers` read an export of a training run, compares its logits with ours, and lets it write.

    python tests/parity/generate_from_export.py logs/demo_train/hf/demo/step-200

The last part of `make demo-train`. Ours are read from the same folder, on the devices that are here; the text is the
beginning of each of the first held-out topics of Python's documentation. Exit code 1 where logits differ.
"""

import argparse
import sys
import warnings

import haliax as hax
import jax
import numpy as np

from haliax_ext.abstract import with_arrays
from haliax_ext.mapping import Mappings
from haliax_ext.program import Input, Program
from levanter.commands.cli.devices import local_target
from levanter.commands.model.pretrained import ModelChoice, describe_pretrained, load_pretrained
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.compat.open import load_tokenizer
from levanter.data import python_docs_text
from levanter.mesh import local_devices
from levanter.models.base import LmHeadModel
from levanter.trainer.config import TrainerConfig

ROWS, POSITIONS = 8, 128
TOLERANCE = 1e-4
PROMPT = 'The "for" statement is used to '


def our_logits(folder: str, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits of every position."""
    trainer = TrainerConfig()
    found = local_devices(trainer.mesh)
    choice = ModelChoice(reference=folder, model=None, tokenizer=None, trainer=trainer)
    model = describe_pretrained(choice, local_target(found), batch=lambda _: ROWS, positions=POSITIONS)
    mesh = model.resolved.spec.build(found.devices)
    Batch, Pos = hax.Axis(trainer.mesh.batch_axis_name or "batch", ROWS), hax.Axis("position", POSITIONS)
    ids = hax.NamedArray(jax.ShapeDtypeStruct(tokens.shape, np.int32), (Batch, Pos))  # type: ignore[arg-type]

    def logits(module: LmHeadModel, tokens: hax.NamedArray) -> hax.NamedArray:
        return module.logits(module(tokens))

    program = Program(
        name="logits",
        function=logits,
        inputs=(
            Input(name="model", value=model.abstract, placement=model.sharding),
            Input(name="tokens", value=ids, placement=Mappings()),
        ),
        mappings=model.resolved.mappings,
        matmul_precision=model.precision.matmul,
    )
    module = with_arrays(model.abstract, load_pretrained(model, mesh, show=False).arrays)
    found_logits = program.jit(mesh)(module, hax.named(tokens, (Batch, Pos)))
    return np.asarray(found_logits.rearrange((Batch, Pos, "vocab")).array)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a Hugging Face export")
    asked = parser.parse_args()
    import torch
    import transformers

    tokenizer = load_tokenizer(asked.folder)
    assert isinstance(tokenizer, FastTokenizer)
    text = python_docs_text(20 * ROWS * POSITIONS)
    starts = range(0, 20 * ROWS * POSITIONS, 20 * POSITIONS)
    tokens = np.stack([tokenizer.encode_batch([text[n:]])[0][:POSITIONS] for n in starts]).astype(np.int32)

    theirs = transformers.AutoModelForCausalLM.from_pretrained(asked.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        reference = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    ours = our_logits(asked.folder, tokens)[..., : reference.shape[-1]]
    difference = float(np.abs(ours - reference).max())
    print(
        f"logits of {ROWS} × {POSITIONS} tokens: at most {difference:.1e} between transformers and levanter "
        f"(the largest is {np.abs(reference).max():.1f})"
    )

    prompt = torch.from_numpy(tokenizer.encode_batch([PROMPT])[0].astype(np.int64))[None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        written = theirs.generate(prompt, max_length=POSITIONS, do_sample=True, temperature=0.7)
    print(f"transformers goes on from {PROMPT!r}:\n{tokenizer.decode(written[0].tolist())}")
    if difference > TOLERANCE:
        print(f"error: logits differ by more than {TOLERANCE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
