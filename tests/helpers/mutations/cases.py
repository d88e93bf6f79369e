"""A case of `make fuzz`: a sound run with one mutation, and what is right for it."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REFUSED, MAY_PASS = (2,), (0, 2, 3)
BEYOND = (2, 3)

TRAIN = """\
model:
  type: llama
  max_seq_len: 32
  hidden_dim: 16
  intermediate_dim: 32
  num_layers: 1
  num_heads: 2
  num_kv_heads: 2
  rope: {{type: default, theta: 10000.0}}
data:
  tokenizer: {here}
  cache_dir: {here}/cache
  shuffle: false
  train_weights: {{a: 1.0}}
  components:
    a:
      source: {{type: url, train_urls: ['{here}/text.jsonl'], validation_urls: ['{here}/text.jsonl']}}
optimizer:
  type: adam
  learning_rate: 1e-3
  beta2: 0.95
  warmup: 0.1
trainer:
  seed: 1
  num_train_steps: 1
  train_batch_size: 8
  per_device_parallelism: -1
  log_dir: {here}/logs
  tracker: {{type: noop}}
  checkpointer: {{base_path: '{here}/checkpoints', save_interval: 15m, keep: [{{every: 10}}]}}
  mesh: {{axes: {{data: -1, model: 1}}}}
"""
EVALUATE = """\
hf_checkpoint: {here}
max_eval_length: 32
output_path: {here}/result.json
data:
  components:
    a:
      source: {{type: url, validation_urls: ['{here}/{text}']}}
trainer:
  log_dir: {here}/logs
  tracker: {{type: noop}}
  per_device_eval_parallelism: 2
"""


@dataclass(frozen=True)
class Case:
    """One mutation, laid out in a folder.

    Attributes:
        name: what was changed.
        command: the entry point; empty for cases that are judged without a run.
        words: its command line.
        codes: the exit codes that are right.
        says: a text that must be said, where it is refused.
        judge: for cases without a run, from the folder to what is wrong.
    """

    name: str
    command: str
    words: tuple[str, ...]
    codes: tuple[int, ...]
    says: str = ""
    judge: Callable[[Path], list[str]] | None = None


Mutation = Callable[[random.Random, Path], Case]


def sound(here: Path, *, text: str = "text.jsonl") -> None:
    """A folder with a tiny checkpoint, its tokenizer, a text, and documents that use them."""
    from helpers.hf_folder import write_folder

    write_folder(here)
    rows = [json.dumps({"text": f"the cat {n} sat on the mat, didn't it? " * 3}) for n in range(20)]
    (here / "text.jsonl").write_text("\n".join(rows) + "\n")
    (here / "train.yaml").write_text(TRAIN.format(here=here))
    (here / "eval.yaml").write_text(EVALUATE.format(here=here, text=text))


def evaluation(here: Path, name: str, codes: tuple[int, ...], says: str = "", *more: str) -> Case:
    """A case of `eval_lm` over the folder."""
    return Case(name, "eval_lm", ("--config_path", str(here / "eval.yaml"), *more), codes, says)


MAX_MESSAGE = 450_000
"""Characters of a message that a user can still read."""


def reading_faults(read: Callable[[], object], where: str, *, seconds: float) -> list[str]:
    """Calls a reader, which may return or refuse with a `ValueError` of this project; lists what else happened.

    Args:
        read: the call.
        where: of what, in the list.
        seconds: of processor time that it may take.
    """
    began, faults = time.process_time(), list[str]()
    try:
        read()
    except (UnicodeError, json.JSONDecodeError) as error:
        faults.append(f"{type(error).__name__}: {error!s:.200}")
    except ValueError as error:
        if not str(error) or len(str(error)) > MAX_MESSAGE:
            faults.append(f"a message of {len(str(error)):,} characters")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - panics of Rust libraries are no `Exception`
        faults.append(f"{type(error).__name__}: {error!s:.200}")
    if (used := time.process_time() - began) > seconds:
        faults.append(f"took {used:.1f} s of processor time")
    return [f"{where}: {fault}" for fault in faults]
