"""Training and evaluation on conversations and pairs, from both generations' YAML.

The expected loss is torch's, over the tokens that transformers' own rendering says the assistant wrote.
"""

import json
import os
import signal

import numpy as np
import pytest
import torch
from helpers.hf_folder import CONFIG, TEXTS, tensors, write_folder, write_json
from transformers import AutoTokenizer, LlamaForCausalLM

from levanter.commands.train.evaluation import validation_rows
from levanter.commands.train.run import execute
from levanter.commands.train.train_lm import TrainLmConfig, describe
from levanter.config import load
from levanter.data import DataError, build_training
from levanter.run import Session, Target
from levanter.tracker import NoopTracker

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}A: "
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}U: {{ message['content'] }}\n{% endif %}{% endfor %}"
)
POSITIONS = 64
LOCAL = Target(name="local", platform="cpu", kind="cpu", devices=8)


def talk(n: int) -> dict:
    turns = [
        ("user", f"what is {n}?"),
        ("assistant", TEXTS[n % 2][: 4 + 2 * n]),
        ("user", "and?"),
        ("assistant", f"{n}"),
    ]
    return {"messages": [{"role": role, "content": content} for role, content in turns[: 2 + n % 3]]}


def pair(n: int) -> dict:
    return {"prompt": f"{n} + 1 = ", "response": str(n + 1) * (1 + n % 4)}


TALKS = {"train": [talk(n) for n in range(8)], "validation": [talk(n) for n in (0, 3, 8, 9, 12)]}
PAIRS = {"train": [pair(n) for n in range(20)], "validation": [pair(n) for n in range(20, 25)]}

NEW = """
data:
  chat_template: TEMPLATE
  components:
    talk:
      source: {train_urls: [FOLDER/talk-train.jsonl], validation_urls: [FOLDER/talk-validation.jsonl]}
      format: {type: chat}
      pack: pad
      tags: [talks]
"""

OLD = """
data:
  train_urls: [FOLDER/talk-train.jsonl]
  validation_urls: [FOLDER/talk-validation.jsonl]
  format: {type: chat, messages_field: messages, chat_template: TEMPLATE, pack: true}
"""

OLD_MIXTURE = """
data:
  configs:
    talk:
      train_urls: [FOLDER/talk-train.jsonl]
      validation_urls: [FOLDER/talk-validation.jsonl]
      format: {type: chat, chat_template: TEMPLATE}
    sums:
      train_urls: [FOLDER/pair-train.jsonl]
      validation_urls: [FOLDER/pair-validation.jsonl]
      format: {type: supervised}
    text:
      train_urls: [FOLDER/text.jsonl]
      validation_urls: [FOLDER/text.jsonl]
  train_weights: {talk: 0.4, sums: 0.4, text: 0.2}
  mixture_block_size: 10
"""

REST = """
  tokenizer: FOLDER/model
  cache_dir: FOLDER/tokens
initialize_from_hf: FOLDER/model
use_hf_model_config: true
train_seq_len: 64
hf_save_path: FOLDER/hf
optimizer: {learning_rate: 0.003, warmup: 0}
trainer:
  tracker: {type: noop}
  mp: f32
  watch: {interval: 0}
  train_batch_size: 8
  per_device_parallelism: 2
  num_train_steps: STEPS
  checkpointer: {base_path: FOLDER/checkpoints, keep: []}
  mesh: {axes: {data: 4, model: 2}, shared_mapping: {vocab: model}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("chats")
    # As transformers' own random weights, which are small: losses that float32 holds to five digits.
    weights = {
        name: each if "norm" in name else (0.1 * each.astype(np.float32)).astype(each.dtype)
        for name, each in tensors().items()
    }
    write_folder(where / "model", config={**CONFIG, "max_position_embeddings": POSITIONS}, weights=weights)
    # transformers 5 takes names of special tokens as text only.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(where / "model" / "tokenizer_config.json", settings)
    files = {f"talk-{split}": TALKS[split] for split in TALKS} | {f"pair-{split}": PAIRS[split] for split in PAIRS}
    files["text"] = [{"text": text} for text in TEXTS]
    for name, records in files.items():
        (where / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return where


def config_of(folder, block, *overrides, name, steps=1):
    text = (block.rstrip() + REST).replace("TEMPLATE", json.dumps(TEMPLATE)).replace("FOLDER/tokens", f"FOLDER/{name}")
    text = text.replace("FOLDER", str(folder)).replace("STEPS", str(steps))
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return load(TrainLmConfig, ["--config_path", str(path), *overrides])


class Recorder(NoopTracker):
    """Keeps the losses and evaluations; sends the process a signal behind a step."""

    def __init__(self, kill_behind=None):
        self.losses, self.evaluations, self.kill_behind = {}, {}, kill_behind

    def log(self, metrics, *, step, commit=None):
        if "train/loss" in metrics:
            self.losses[step] = metrics["train/loss"]
        if "eval/loss" in metrics:
            self.evaluations[step] = dict(metrics)
        if step == self.kill_behind:
            os.kill(os.getpid(), signal.SIGTERM)


def run(plan, devices, *, run_id, kill_behind=None):
    tracker = Recorder(kill_behind)
    return execute(plan, plan.mesh.build(devices), Session(run_id=run_id, tracker=tracker)), tracker


class Oracle:
    """Losses by transformers and torch, a record at a time: sums over the tokens that count."""

    def __init__(self, weights, tokenizer):
        self.model = LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def of(self, ids, counted):
        labels = torch.tensor([[i if c else -100 for i, c in zip(ids, counted, strict=True)]])
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[:, :-1]
        nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="sum")
        return float(nats), sum(counted[1:])

    def rendered(self, record):
        found = self.tokenizer.apply_chat_template(
            record["messages"], chat_template=TEMPLATE, return_assistant_tokens_mask=True, return_dict=True
        )
        return found["input_ids"], found["assistant_masks"]

    def talk(self, record):
        return self.of(*self.rendered(record))

    def counted_tokens(self, records):
        ids = [i for record in records for i, counted in zip(*self.rendered(record), strict=True) if counted]
        return self.tokenizer.convert_ids_to_tokens(ids)

    def pair(self, record):
        def ids(text):
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

        prompt = [self.tokenizer.bos_token_id, *ids(record["prompt"])]
        target = [*ids(record["response"]), self.tokenizer.eos_token_id]
        return self.of(prompt + target, [0] * len(prompt) + [1] * len(target))

    def loss(self, of, records):
        sums = np.array([of(record) for record in records])
        return sums[:, 0].sum() / sums[:, 1].sum(), int(sums[:, 1].sum())


def test_a_step_and_an_evaluation_on_conversations(folder, devices):
    """2026's YAML, padded rows: the whole set is one batch, so its loss is the mean over all counted tokens."""
    config = config_of(folder, NEW, name="new")
    plan = describe(config, LOCAL).check()
    assert [program.name for program in plan.computing][-1] == "evaluate"
    done, tracker = run(plan, devices, run_id="new")
    before, after = (Oracle(weights, folder / "model") for weights in (folder / "model", done.exported))
    assert tracker.losses[0] == pytest.approx(before.loss(before.talk, TALKS["train"])[0], rel=2e-5)
    expected, counted = after.loss(after.talk, TALKS["validation"])
    (only,) = done.evaluation.sets
    assert (only.name, only.tags, only.documents, only.score.tokens) == ("talk", ("talks", "talk"), 5, counted)
    assert only.score.loss == pytest.approx(expected, rel=2e-5)
    assert tracker.evaluations[0]["eval/talk/loss"] == only.score.loss
    # Bytes of what counts, and of nothing else; the end of a turn stands for none. A character a byte, in these tokens.
    assert only.score.bytes == sum(len(token) for token in after.counted_tokens(TALKS["validation"]) if token != "</s>")


def rows_of(plan):
    return build_training(
        plan.work.config.data, plan.work.tokenizer, positions=POSITIONS, batch_sizes=[(0, 1)], seed=0, vocab_size=320
    )


def test_packed_rows_lose_what_padded_ones_lose(folder):
    """1.x's YAML of one set: the counted tokens of its packed rows are those of the padded ones."""
    plans = [describe(config_of(folder, block, name=name), LOCAL) for block, name in ((NEW, "new"), (OLD, "old"))]
    found = []
    for plan in plans:
        rows = validation_rows(
            plan.work.config.data, plan.work.validation, rows_of(plan), plan.work.tokenizer, vocab_size=320
        )
        taken = rows.take(np.arange(rows.row_count))
        found.append((rows.row_count, sorted(taken.targets[taken.loss_mask].tolist()), int(taken.scored_bytes.sum())))
        # Padding belongs to no document.
        assert (taken.segment_ids[:, -1] == -1).any() and not taken.loss_mask[taken.segment_ids == -1].any()
    (padded, *same), (packed, *as_these) = found
    assert same == as_these and packed < padded == 5


def test_a_mixture_of_text_and_chats_resumes_exactly(folder, devices):
    """1.x's YAML of a mixture: conversations, pairs and text; each validation set against torch."""
    config = config_of(folder, OLD_MIXTURE, name="mixture", steps=4)
    plan = describe(config, LOCAL).check()
    straight, whole = run(plan, devices, run_id="straight")
    stopped, first = run(plan, devices, run_id="again", kill_behind=0)
    assert stopped.preempted and stopped.taken == 2
    _, second = run(plan, devices, run_id="again")
    assert {**first.losses, **second.losses} == whole.losses and list(second.losses) == [2, 3]
    oracle = Oracle(straight.exported, folder / "model")
    talks, sums, text = straight.evaluation.sets
    assert (talks.name, sums.name, text.name) == ("talk", "sums", "text")
    for one, of, records in ((talks, oracle.talk, TALKS), (sums, oracle.pair, PAIRS)):
        expected, counted = oracle.loss(of, records["validation"])
        assert one.score.tokens == counted
        assert one.score.loss == pytest.approx(expected, rel=2e-5)
    # Text is scored as it always was: all of it.
    assert text.score.bytes == sum(len(each.encode()) for each in TEXTS)
    assert whole.evaluations[3]["eval/loss"] == straight.evaluation.overall.micro.loss


def test_a_set_that_teaches_nothing_is_refused(folder):
    """Roles that the template does not take for the assistant's: a run would learn nothing, and say nothing."""
    strange = json.loads(json.dumps(TALKS["train"]).replace('"assistant"', '"gpt"'))
    (folder / "strange.jsonl").write_text("".join(json.dumps(record) + "\n" for record in strange))
    block = NEW.replace("talk-train.jsonl", "strange.jsonl")
    plan = describe(config_of(folder, block, name="strange"), LOCAL).check()
    with pytest.raises(DataError, match=r"'talk': none of its .* tokens counts in the loss; nothing that the template"):
        rows_of(plan)
