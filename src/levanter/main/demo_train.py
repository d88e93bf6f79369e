"""Demo of training: a small byte-level model is trained on Python's documentation.

    make demo-train

It runs `train_lm` with `config/train/demo.yaml`, followed by one comparison: the loss on held-out topics against the
entropy of a byte given the previous one, counted over the complete text. A model below that number has learned more
than which letters follow each other.
"""

import math
import sys

import numpy as np

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.cli.lifecycle import exit_process
from levanter.commands.train.lm.train_lm import TrainLmConfig, train
from levanter.data import python_docs_text
from levanter.eval.perplexity import EvalResult
from levanter.runplan import INTERNAL_ERROR, OK, PREEMPTED


def bigram_entropy(text: bytes) -> float:
    """Nats per byte, given the previous byte: Σ n(ab) ln(n(a) / n(ab)) / Σ n(ab)."""
    values = np.frombuffer(text, np.uint8).astype(np.int64)
    # counts[a, b] is how often byte b follows byte a.
    counts = np.bincount(256 * values[:-1] + values[1:], minlength=256 * 256).reshape(256, 256)
    before = np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape)
    # Pairs that never occur contribute nothing, and their logarithm is not defined.
    seen = counts > 0
    return float(np.sum(counts[seen] * np.log(before[seen] / counts[seen])) / counts.sum())


def main(config: TrainLmConfig) -> int:
    """Runs the demo; returns 0 if the held-out loss is below the bigram entropy."""
    done = train(config)
    if done.preempted:
        return PREEMPTED
    if not isinstance(done.evaluation, EvalResult):
        raise ValueError("the demo compares a held-out loss, and nothing was evaluated; use config/train/demo.yaml")
    if (bits := done.evaluation.overall.micro.bits_per_byte) is None:
        raise ValueError("the demo compares bits per byte, and the ids of data.tokenizer do not keep the text")
    # Bits per byte to nats per byte.
    loss = math.log(2) * bits
    entropy = bigram_entropy(python_docs_text().encode())
    print(f"held-out loss {loss:.3f} nats per byte; the text's bigram entropy {entropy:.3f} nats per byte")
    if loss < entropy:
        return OK
    print("error: the held-out loss is not below it; more steps may help", file=sys.stderr)
    return INTERNAL_ERROR


if __name__ == "__main__":
    exit_process(run_entry_point(TrainLmConfig, main))
