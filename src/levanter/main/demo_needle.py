"""Demo of context extension: a small model that retrieves needles from 512 tokens is trained to retrieve from 2,048.

It runs `eval_needles` on the model of `config/needles/demo.yaml`, `train_lm` with that file (a YaRN stage of a hundred
steps), and `eval_needles` on the exported model. The training texts are generated here, from a seed.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.cli.lifecycle import exit_process
from levanter.commands.cli.runner import run_config
from levanter.commands.evaluate.needles.config import EvalNeedlesConfig
from levanter.commands.evaluate.needles.run import ENTRY_POINT as NEEDLES
from levanter.commands.train.lm.train_lm import TrainLmConfig, train
from levanter.compat.open import load_tokenizer
from levanter.eval.needles.results import summarize_needles
from levanter.eval.needles.training_docs import training_documents
from levanter.io import atomic_write
from levanter.runplan import INTERNAL_ERROR, OK, PREEMPTED

TASK, DEPTHS, SAMPLES = "niah_single_1", 5, 20
SHORT, LONG = 512, 2048
TEXTS = 400
"""Training texts of the stage; none of them is part of an evaluation."""


def main(config: TrainLmConfig) -> int:
    """Runs the demo; returns 0 if the scores before and after the stage are as expected."""
    began = time.monotonic()
    if not isinstance(config.initialize_from_hf, str) or config.hf_save_path is None:
        raise ValueError("the demo begins from a checkpoint and exports another; use config/needles/demo.yaml")
    folder = Path(str(config.trainer.log_dir))
    before = _evaluate(config, config.initialize_from_hf, folder / "before")
    _write_lessons(config.initialize_from_hf, folder / "lessons.jsonl")
    # The stage exports a Hugging Face folder, which the second evaluation loads like any model.
    done = train(config)
    if done.preempted:
        return PREEMPTED
    assert done.exported is not None, "a run that ends exports its model"
    after = _evaluate(config, done.exported, folder / "after")
    print(f"\n=== needles found of {SAMPLES}, by depth and length")
    print(f"{'':>12}{'before':>16}{'':>8}{'after the stage':>18}")
    print(f"{'depth':>12}" + 2 * "".join(f"{length:>12,}" for length in (SHORT, LONG)))
    for n in range(DEPTHS):
        # Per depth: both lengths before the stage, then both after it.
        cells = [results[str(length)]["depths"][n] for results in (before, after) for length in (SHORT, LONG)]
        row = "".join(f"{cell['found']:>9}/{cell['asked']:<2}" for cell in cells)
        print(f"{cells[0]['depth']:>12.0%}{row}".rstrip())
    shares = [results[str(length)]["score"] for results in (before, after) for length in (SHORT, LONG)]
    print(f"{'all':>12}" + "".join(f"{share:>12.0%}" for share in shares))
    print(f"pages: {folder}/before/page.html, {folder}/after/page.html")
    print(f"{done.taken} steps; {time.monotonic() - began:.0f} s in all")
    # The demo must show the gap as well: a model that finds long needles before the stage has not learned it there.
    if shares[0] >= 0.99 and shares[1] < 0.5 and shares[3] >= 0.95:
        return OK
    print("error: expected at least 99 % at 512, less than 50 % at 2,048 before and 95 % after", file=sys.stderr)
    return INTERNAL_ERROR


def _evaluate(config: TrainLmConfig, model: str, folder: Path) -> Mapping[str, Any]:
    """The scores of a model, by length."""
    eval_config = EvalNeedlesConfig(
        hf_checkpoint=model,
        tasks=[TASK],
        lengths=[SHORT, LONG],
        samples=SAMPLES,
        depths=DEPTHS,
        trainer=replace(config.trainer, per_device_eval_parallelism=4),
        output_path=str(folder),
        if_exists="replace",
    )
    result = run_config(NEEDLES, eval_config).result
    assert result is not None
    return summarize_needles(result.answered, depths=DEPTHS)["tasks"][TASK]


def _write_lessons(model: str, path: Path) -> None:
    """Texts of the long length with needles and questions, by a seed of their own."""
    encode = load_tokenizer(model).encode_with_offsets
    # Seed 1: the evaluation draws its texts with another one, so none of these is part of it.
    lines = (json.dumps(document) + "\n" for document in training_documents(encode, length=LONG, count=TEXTS, seed=1))
    with atomic_write(str(path)) as file:
        file.write("".join(lines).encode())


if __name__ == "__main__":
    exit_process(run_entry_point(TrainLmConfig, main))
