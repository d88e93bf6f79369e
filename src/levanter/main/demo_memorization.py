"""Demo of memorization: trains a small Llama on the first half of a text, then scores the whole text.

    python -m levanter.main.demo_memorization [--output_path logs/demo_memorization] [--steps 400]

The text is a chapter of Python's own reference manual, which ships with every Python. A tokenizer is trained on it; a
Llama of about a million parameters learns only its first half, through the train step of `train_lm`; its weights are
written as a Hugging Face folder; and `eval_careless_lm` scores the entire chapter with them, window by window. The
report has a dark half, which the model has memorized, and a white one, which it has never seen.
"""

import json
import sys
import time
from dataclasses import dataclass, field, replace
from importlib import import_module

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from haliax_ext.abstract import leaves
from haliax_ext.leaf_layout import to_slices
from levanter.commands.cli.compilation_cache import keep_compiled
from levanter.commands.cli.devices import configure_jax, local_target
from levanter.commands.cli.errors import run_entry_point
from levanter.commands.cli.lifecycle import exit_process
from levanter.commands.memorize.config import EvalCarelessLmConfig
from levanter.commands.train.lm.train_lm import TrainLmConfig
from levanter.commands.train.work import TrainWork
from levanter.compat.hf.config_bridge import write_config
from levanter.compat.open import load_tokenizer
from levanter.data import LmDataConfig, next_tokens
from levanter.io import Output, Progress, atomic_write, join, probe
from levanter.main import eval_careless_lm, train_lm
from levanter.memorization.measurement import Measurement, measure
from levanter.memorization.outputs import REPORT
from levanter.memorization.results import BookResult
from levanter.mesh import local_devices
from levanter.models import LlamaConfig
from levanter.models.base import LmHeadModel
from levanter.optim import AdamConfig
from levanter.runplan import INTERNAL_ERROR, OK, RunPlan
from levanter.tracker import NoopConfig
from levanter.trainer.config import TrainerConfig
from levanter.trainer.loss import LmBatch

CHAPTER = "specialnames"
TITLE = "Special method names, from Python's reference manual"
TEXT, MODEL, BOOK = "chapter.txt", "model", "book"
KNOWN, UNKNOWN = 0.9, 0.02
"""The coverage that the demo must reach: of the first half above `KNOWN`, of the second below `UNKNOWN`."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train a small Llama on half of a text, then measure how much of it the model memorized.

    Attributes:
        output_path: the folder of the text, the model and the report.
        characters: length of the text, from the start of the chapter.
        vocab_size: vocabulary size of the tokenizer.
        steps: training steps.
        rows: sequences per batch.
        positions: tokens per sequence.
        hidden_dim: size of the residual stream, a multiple of 32.
        num_layers: number of layers.
        learning_rate: peak learning rate.
        trainer: devices and precision.
    """

    output_path: str = "logs/demo_memorization"
    characters: int = 24_000
    vocab_size: int = 1024
    steps: int = 220
    rows: int = 16
    positions: int = 128
    hidden_dim: int = 192
    num_layers: int = 3
    learning_rate: float = 3e-3
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self):
        if self.characters < 2000 or self.vocab_size < 300:
            raise ValueError("characters must be at least 2000, vocab_size at least 300 (256 of them are bytes)")
        if self.hidden_dim % 32:
            raise ValueError(
                f"hidden_dim must be a multiple of 32, the size of an attention head; got {self.hidden_dim}"
            )

    @property
    def model(self) -> LlamaConfig:
        """The architecture."""
        heads = self.hidden_dim // 32
        return LlamaConfig(
            max_seq_len=self.positions,
            hidden_dim=self.hidden_dim,
            # 8/3 instead of 4 times the hidden size: a gated feed-forward has three matrices instead of two.
            intermediate_dim=8 * self.hidden_dim // 3,
            num_layers=self.num_layers,
            num_heads=heads,
            num_kv_heads=heads,
            tie_word_embeddings=True,
            # The activations of this model are small; recomputing them would only take time.
            gradient_checkpointing=False,
            vocab_size=self.vocab_size,
        )

    @property
    def optimizer(self) -> AdamConfig:
        """The optimizer; without weight decay, so that the model memorizes."""
        return AdamConfig(learning_rate=self.learning_rate, warmup=20, weight_decay=0.0, min_lr_ratio=0.05)


def run(config: DemoConfig) -> tuple[Measurement, tuple[float, float]]:
    """Learns the first half and scores everything; returns the measurement and the coverage of both halves."""
    # A demo writes its own folder and nothing else.
    config = replace(config, trainer=replace(config.trainer, tracker=NoopConfig()))
    configure_jax(config.trainer)
    # The folder is tested for writing before anything is computed.
    probe([Output(key="output_path", path=config.output_path, kind="folder")])
    text = chapter(config.characters)
    folder = join(config.output_path, MODEL)
    _write(join(config.output_path, TEXT), text.encode("utf-8"))
    _write(join(folder, "tokenizer.json"), fitted_tokenizer(text, config.vocab_size).to_str().encode("utf-8"))
    half = text[: len(text) // 2]
    # Only the first half is encoded: the model must not see a token of the second.
    ids = load_tokenizer(folder).encode_batch([half])[0]
    print(f"{len(text):,} characters, of which the first {len(half):,} ({len(ids):,} tokens) are learned")
    learn(config, ids, folder)

    evaluation = EvalCarelessLmConfig(
        hf_checkpoint=folder,
        txt_path=join(config.output_path, TEXT),
        book_title=TITLE,
        output_base_path=join(config.output_path, BOOK),
        preset="levanter",
        # A second run of the demo writes over the first one.
        if_exists="replace",
        trainer=config.trainer,
    )
    eval_careless_lm.main(evaluation)
    measurement = measure(BookResult.read(join(config.output_path, BOOK)))
    # `covered` has a value for each character of the text, so the halves are cut by characters.
    return measurement, (float(measurement.covered[: len(half)].mean()), float(measurement.covered[len(half) :].mean()))


def learn(config: DemoConfig, ids: np.ndarray, folder: str) -> None:
    """Trains a model on `ids` with the Programs of `train_lm`, and writes it to `folder`."""
    devices = local_devices(config.trainer.mesh)
    keep_compiled(config.trainer, platform=devices.platform)
    training = TrainLmConfig(
        data=LmDataConfig(tokenizer=folder),
        model=config.model,
        optimizer=config.optimizer,
        trainer=replace(config.trainer, train_batch_size=config.rows, num_train_steps=config.steps),
        train_seq_len=config.positions,
    )
    plan = train_lm.describe(training, local_target(devices)).check()
    mesh = plan.mesh.build(devices.devices)
    # The Programs of the plan are run as they are: the demo compiles nothing of its own.
    state = plan.program("init_state").jit(mesh)(jax.random.PRNGKey(config.trainer.seed))
    step = plan.program("train_step").jit(mesh)
    random = np.random.default_rng(config.trainer.seed)
    began = time.monotonic()
    with Progress("learning", total=config.steps, unit="steps") as progress:
        for n in range(config.steps):
            # Stretches from anywhere, wrapping around at the end, so that no token is rarer than another.
            # [rows, positions]: each row is a stretch of consecutive tokens from a random start.
            starts = random.integers(0, len(ids), size=(config.rows, 1))
            rows = ids[(starts + np.arange(config.positions)) % len(ids)]
            state, metrics = step(state, None, _batch(plan, mesh, rows))
            progress.advance_to(n + 1)
            if (n + 1) % 20 == 0:
                # The remaining loss is that of the first tokens of each stretch, whose position in the text is unknown.
                print(f"step {n + 1:4d}: loss {float(metrics.loss):.3f} after {time.monotonic() - began:.0f} s")
    write_model(plan.work, state.model, folder)


def _batch(plan: RunPlan, mesh: Mesh, rows: np.ndarray) -> LmBatch:
    """Rows of tokens as the train step expects them, all with the same weight."""
    # Optional fields that the step was not planned with must stay None, or its structure would differ.
    declared: LmBatch = plan.program("train_step").input("batch").value
    sharding = NamedSharding(mesh, plan.sharding.mappings.compute.spec([axis.name for axis in declared.tokens.axes]))

    def placed(values: np.ndarray, like: hax.NamedArray | None) -> hax.NamedArray | None:
        return None if like is None else hax.NamedArray(jax.device_put(values, sharding), like.axes)

    tokens = placed(rows.astype(np.int32), declared.tokens)
    targets = placed(next_tokens(rows), declared.targets)
    assert tokens is not None and targets is not None
    return LmBatch(
        tokens=tokens,
        targets=targets,
        loss_weights=placed(np.ones(rows.shape, np.float32), declared.loss_weights),
        segment_ids=placed(np.zeros(rows.shape, np.int32), declared.segment_ids),
    )


def write_model(work: TrainWork, model: LmHeadModel, folder: str) -> None:
    """Writes a model like Hugging Face: config.json and model.safetensors, by the inverse of the loading rules."""
    model_leaves = leaves(model)
    arrays = {leaf.path: np.asarray(x) for leaf, x in zip(model_leaves, jax.tree.leaves(model), strict=True)}
    tensors = {}
    for name, (shape, pieces) in work.model.weight_rules(work.Vocab).sources(model_leaves).items():
        # The demo's tensors have no gaps: every element is written by one of the pieces.
        tensors[name] = np.empty(shape, np.float32)
        for piece in pieces:
            piece.write(arrays[piece.target][to_slices(piece.box)], tensors[name])
    document = write_config(work.model, dtype="float32")
    _write(join(folder, "config.json"), (json.dumps(document, indent=2, sort_keys=True) + "\n").encode("utf-8"))
    _write(join(folder, "model.safetensors"), save(tensors, metadata={"format": "pt"}))


def chapter(characters: int) -> str:
    """The beginning of the chapter, as `help('SPECIALMETHODS')` shows it."""
    return import_module("pydoc_data.topics").topics[CHAPTER][:characters]


def fitted_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """A byte-level BPE trained on `text`."""
    # Byte-level: every text can be encoded, whatever it contains.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def _write(path: str, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


def main(config: DemoConfig) -> int:
    """Runs the demo; returns 0 if the report shows what it must."""
    began = time.monotonic()
    _, (first, second) = run(config)
    print(f"coverage of the first half, which was learned: {first:.2%}; of the second: {second:.2%}")
    print(f"done in {time.monotonic() - began:.0f} s; report in {join(config.output_path, BOOK, REPORT)}")
    if first > KNOWN and second < UNKNOWN:
        return OK
    print(f"error: expected above {KNOWN:.0%} and below {UNKNOWN:.0%}; more steps may help", file=sys.stderr)
    return INTERNAL_ERROR


if __name__ == "__main__":
    exit_process(run_entry_point(DemoConfig, main))
