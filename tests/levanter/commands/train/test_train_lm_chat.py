"""Training and evaluation on conversations and pairs, from both generations' YAML.

The expected loss is torch's, over the tokens that transformers' own rendering says the assistant wrote.
"""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.hf_folder import CONFIG, TEXTS, tensors, write_folder, write_json
from safetensors.numpy import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate import eval_lm, viz_logprobs
from levanter.commands.train.lm.evaluation import validation_rows
from levanter.commands.train.lm.sft_config import SftConfig, SftMixtureConfig
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.commands.train.run import execute
from levanter.config import load
from levanter.data import DataError, build_training
from levanter.runplan import Session, Target
from levanter.tracker import NoopTracker

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}A: "
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}U: {{ message['content'] }}\n{% endif %}{% endfor %}"
)
POSITIONS = 64
ROOT = Path(__file__).parents[4]
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


OLD_SFT = """
supervised_data: {cache_dir: FOLDER/tokens}
dataset_type: chat_jsonl
chat_train_urls: [FOLDER/talk-train.jsonl]
input_role: user
output_role: assistant
tokenizer: FOLDER/model
initialize_from_hf: true
model_name_or_path: FOLDER/model
max_seq_len: 64
hf_save_steps: 0
"""

OLD_SFT_MIXTURE = """
supervised_data:
  talk: {cache_dir: FOLDER/tokens/talk, train_urls: [FOLDER/talk-train.jsonl]}
  more: {cache_dir: FOLDER/tokens/more, train_urls: [FOLDER/talk-validation.jsonl]}
mixture_weights: {talk: 3, more: 1}
mixture_block_size: 16
reinit_tokens: false
tokenizer: FOLDER/model
initialize_from_hf: FOLDER/model
max_seq_len: 64
"""


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


def sft_config_of(cls, folder, block, *, name):
    """As an old document of `sft` or `sft_mixture`, with what a run on 8 devices needs besides."""
    rest = REST[REST.index("optimizer:") :].replace("STEPS", "1")
    text = (block + rest).replace("FOLDER/tokens", f"FOLDER/{name}").replace("FOLDER", str(folder))
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return load(cls, ["--config_path", str(path)])


def run(plan, devices, *, run_id, kill_behind=None):
    tracker = Recorder(kill_behind)
    return execute(plan, plan.mesh.build(devices), Session(run_id=run_id, tracker=tracker)), tracker


class Oracle:
    """Losses by transformers and torch, a record at a time: sums over the tokens that count."""

    def __init__(self, weights, tokenizer):
        self.model = LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.likeliest = 0

    def of(self, ids, counted):
        labels = torch.tensor([[i if c else -100 for i, c in zip(ids, counted, strict=True)]])
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[:, :-1]
        nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="sum")
        self.likeliest += int((logits.argmax(-1) == labels[:, 1:]).sum())
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

    def first_pair(self, record):
        """What upstream's `sft` made of a conversation: the first question and the first answer, and the end."""
        found = {message["role"]: message["content"] for message in reversed(record["messages"])}
        whole = self.tokenizer(
            found["user"] + found["assistant"], add_special_tokens=False, return_offsets_mapping=True
        )
        counted = [int(stop > len(found["user"])) for _, stop in whole["offset_mapping"]]
        ids = [self.tokenizer.bos_token_id, *whole["input_ids"], self.tokenizer.eos_token_id]
        return ids, [0, *counted, 1]

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
    assert only.score.likeliest == after.likeliest > 0
    assert tracker.evaluations[0]["eval/talk/accuracy"] == after.likeliest / counted
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
            plan.work.config.data,
            plan.work.rows.validation,
            rows_of(plan),
            plan.work.tokenizer,
            vocab_size=320,
            positions=POSITIONS,
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


@pytest.mark.parametrize(
    ("role", "template", "expected"),
    [
        ("gpt", TEMPLATE, r"strange\.jsonl:1: message 2: unknown role 'gpt'"),
        ("tool", TEMPLATE, r"'talk' is empty: no conversation in which the assistant says something"),
        ("assistant", TEMPLATE.replace("'assistant'", "'model'"), r"strange\.jsonl:1: nothing counts in the loss"),
    ],
)
def test_a_set_that_teaches_nothing_is_refused(folder, role, template, expected):
    """Roles that the template does not take for the assistant's: a run would learn nothing, and say nothing."""
    strange = json.loads(json.dumps(TALKS["train"]).replace('"assistant"', f'"{role}"'))
    (folder / "strange.jsonl").write_text("".join(json.dumps(record) + "\n" for record in strange))
    block = NEW.replace("talk-train.jsonl", "strange.jsonl").replace("TEMPLATE", json.dumps(template))
    plan = describe(config_of(folder, block, name=f"strange-{role}"), LOCAL).check()
    with pytest.raises(DataError, match=expected):
        rows_of(plan)


def test_upstreams_documents_of_sft(folder):
    """2025's YAML of `sft`: pairs of a question and an answer, token for token as it made them."""
    config = sft_config_of(SftConfig, folder, OLD_SFT, name="sft")
    assert config.train_seq_len == 64 and config.use_hf_model_config and config.data.shuffle is True
    plan = describe(config, LOCAL).check()
    (one,) = rows_of(plan).sets
    assert one.name == "chat"
    taken = one.rows.take(np.arange(len(one.rows)))
    found = []
    for tokens, weights, segments in zip(taken.tokens, taken.loss_weights, taken.segment_ids, strict=True):
        assert segments.max() <= 3
        for number in range(segments.max() + 1):
            here = segments == number
            found.append((tokens[here].tolist(), [0, *(weights[here][:-1] > 0).astype(int).tolist()]))
    oracle = Oracle(folder / "model", folder / "model")
    assert sorted(found) == sorted(oracle.first_pair(record) for record in TALKS["train"])


@pytest.mark.slow
def test_upstreams_document_of_sft_with_an_adapter(folder, devices):
    """Old keys beside `adapter:`: the same rows and the same first loss, and adapters come of it."""
    beside = "adapter: {type: lora, r: 4, zero_init_b: true, a_init_mode: peft, modules_to_save: [norm]}\n"
    config = sft_config_of(SftConfig, folder, OLD_SFT + beside + "peft_save_path: FOLDER/peft\n", name="sft_lora")
    plan = describe(config, LOCAL).check()
    assert plan.work.adapted is not None and plan.work.adapted.whole == ("transformer.norm.weight",)
    done, tracker = run(plan, devices, run_id="sft_lora")
    whole, full = run(
        describe(sft_config_of(SftConfig, folder, OLD_SFT, name="sft_full"), LOCAL).check(), devices, run_id="full"
    )
    assert whole.taken == done.taken == 1
    assert tracker.losses[0] == pytest.approx(full.losses[0], rel=1e-6)
    names = load_file(f"{done.exported}/adapter_model.safetensors")
    assert "base_model.model.model.norm.weight" in names and len(names) > 8


def test_upstreams_document_of_a_mixture_of_sft(folder):
    config = sft_config_of(SftMixtureConfig, folder, OLD_SFT_MIXTURE, name="sft_mixture")
    assert config.data.train_weights == {"talk": 3, "more": 1} and config.data.mixture_block_size == 16
    plan = describe(config, LOCAL).check()
    assert [one.name for one in rows_of(plan).sets] == ["talk", "more"]


def test_eval_lm_and_viz_logprobs_score_conversations_alike(folder, tmp_path):
    document = {
        "hf_checkpoint": str(folder / "model"),
        "max_eval_length": POSITIONS,
        "data": {
            "chat_template": TEMPLATE,
            "components": {
                "talk": {
                    "source": {"validation_urls": [str(folder / "talk-validation.jsonl")]},
                    "format": {"type": "chat"},
                }
            },
        },
        "trainer": {
            "mp": "f32",
            "tracker": {"type": "noop"},
            "per_device_eval_parallelism": 1,
            "mesh": {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}},
        },
    }
    path, out, page = tmp_path / "eval.yaml", tmp_path / "out.json", tmp_path / "page.html"
    path.write_text(json.dumps(document))
    words = ["--config_path", str(path)]
    assert run_entry_point(eval_lm.EvalLmConfig, eval_lm.main, [*words, "--output_path", str(out)]) == 0
    found = json.loads(out.read_text())["sets"]["talk"]
    oracle = Oracle(folder / "model", folder / "model")
    expected, counted = oracle.loss(oracle.talk, TALKS["validation"])
    assert found["loss"] == pytest.approx(expected, rel=2e-5)
    assert (found["tokens"], found["accuracy"]) == (counted, oracle.likeliest / counted)
    assert run_entry_point(viz_logprobs.VizLmConfig, viz_logprobs.main, [*words, "--path", str(page)]) == 0
    assert "talk" in page.read_text()


def test_the_example_of_the_documentation(monkeypatch):
    """SmolLM2's own template, which marks nothing: what counts is derived, and shown."""
    monkeypatch.chdir(ROOT)
    config = load(TrainLmConfig, ["--config_path", "config/sft/smollm2_chat.yaml"])
    plan = describe(config, Target(name="local", platform="cpu", kind="cpu", devices=1)).check()
    (line,) = [check.message for check in plan.checks if "chat template" in check.message]
    assert line.startswith("vellmar: the tokenizer's chat template (sha256 872be49dbb63…); ")
    assert line.endswith("the assistant's tokens count, derived (the template does not mark them)")
    data = build_training(config.data, plan.work.tokenizer, positions=256, batch_sizes=[(0, 4)], seed=0)
    assert "3,775 tokens, 31.0% of them count in 48 documents; 16 rows of 256" in data.described[0]
    assert "⟦The capital of Vellmar is Orrindel.<|im_end|>\n  ⟧<|im_start|>user" in data.samples[0]
