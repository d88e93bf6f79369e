"""Preferences against closed forms in float64, torch, and trl's `DPOTrainer` (extra `judges`)."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.preference_runs import (
    LOCAL,
    POSITIONS,
    TEMPLATE,
    Logged,
    document,
    pair,
    write_inputs,
)

from levanter.commands.train.dpo.config import TrainDpoConfig
from levanter.commands.train.dpo.train_dpo import ENTRY_POINT, describe
from levanter.config import parse
from levanter.runplan import Session
from levanter.trainer.dpo import PreferenceLossConfig, pair_terms
from levanter.trainer.objective import LOSS

BETA = 0.3
RNG = np.random.default_rng(11)
COUNTS = RNG.integers(2, 30, (6, 2)).astype(np.float64)
POLICY = -RNG.random((6, 2)) * 2 * COUNTS
REFERENCE = -RNG.random((6, 2)) * 2 * COUNTS


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def closed_form(kind: str, e: float, gamma: float, policy, counts, reference) -> float:
    """One pair, written down from the papers, with Python's floats."""
    (c, r), (nc, nr), (rc, rr) = policy, counts, reference
    x = BETA * ((c - r) - (rc - rr))
    if kind == "sigmoid":
        return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)
    if kind == "robust":
        return ((1 - e) * -log_sigmoid(x) + e * log_sigmoid(-x)) / (1 - 2 * e)
    if kind == "ipo":
        return ((c / nc - r / nr) - (rc / nc - rr / nr) - 1 / (2 * BETA)) ** 2
    if kind == "hinge":
        return max(0.0, 1 - x)
    if kind == "simpo":
        return -log_sigmoid(BETA * (c / nc - r / nr) - gamma)
    odds = [math.log(math.exp(p) / (1 - math.exp(p))) for p in (c / nc, r / nr)]
    return -c / nc - BETA * log_sigmoid(odds[0] - odds[1])


CASES = [
    ("sigmoid", {}),
    ("sigmoid", {"label_smoothing": 0.2}),
    ("robust", {"label_smoothing": 0.2}),
    ("robust", {}),
    ("ipo", {}),
    ("hinge", {}),
    ("simpo", {}),
    ("simpo", {"gamma": 1.25}),
    ("orpo", {}),
]


@pytest.mark.parametrize(("kind", "more"), CASES, ids=[f"{kind}-{'-'.join(more) or 'plain'}" for kind, more in CASES])
def test_losses_and_gradients_are_the_closed_forms(kind, more):
    loss = PreferenceLossConfig(type=kind, **more)
    e, gamma = loss.label_smoothing, 0.5 if loss.gamma is None else loss.gamma

    def expected(policy):
        return [closed_form(kind, e, gamma, *each) for each in zip(policy, COUNTS, REFERENCE, strict=True)]

    def ours(policy):
        return pair_terms(loss, BETA, policy, jnp.float32(COUNTS), jnp.float32(REFERENCE))[LOSS]

    scale = np.abs(expected(POLICY)).max()
    np.testing.assert_allclose(ours(jnp.float32(POLICY)), expected(POLICY), atol=1e-6 * scale, rtol=1e-6)
    found = jax.grad(lambda policy: ours(policy).sum())(jnp.float32(POLICY))
    step, numeric = 1e-5, np.zeros_like(POLICY)
    for n in range(2):
        moved = np.zeros((1, 2))
        moved[0, n] = step
        numeric[:, n] = (np.array(expected(POLICY + moved)) - np.array(expected(POLICY - moved))) / (2 * step)
    np.testing.assert_allclose(found, numeric, atol=2e-6 * max(np.abs(numeric).max(), 1), rtol=1e-5)


def test_upstreams_metrics():
    found = pair_terms(PreferenceLossConfig(), BETA, POLICY, COUNTS, REFERENCE, xp=np)
    delta, base = POLICY[:, 0] - POLICY[:, 1], REFERENCE[:, 0] - REFERENCE[:, 1]
    np.testing.assert_array_equal(found["dpo_margin_policy"], delta)
    np.testing.assert_array_equal(found["dpo_margin_ref"], base)
    np.testing.assert_array_equal(found["dpo_accuracy"], delta > base)
    np.testing.assert_allclose(found["dpo_chosen_reward"], BETA * (POLICY - REFERENCE)[:, 0], rtol=1e-12)
    np.testing.assert_allclose(found["dpo_rejected_reward"], BETA * (POLICY - REFERENCE)[:, 1], rtol=1e-12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("dpo"))


def losses(folder, out, *, devices=8, **more) -> Logged:
    trainer = {"mesh": {"axes": {"data": devices}}, **more.pop("trainer", {})}
    config = parse(TrainDpoConfig, overrides=document(folder, out, trainer=trainer, **more))
    plan = describe(config, replace(LOCAL, devices=devices)).check()
    tracker = Logged()
    ENTRY_POINT.execute(plan, plan.mesh.build(jax.devices()[:devices]), Session(run_id="run", tracker=tracker))
    return tracker


def torch_losses(folder, kind: str, steps: int, *, reference: str = "model", lr: float = 0.003) -> list[float]:
    """The same run by transformers and torch: plain SGD-free AdamW over all pairs in document order."""
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    policy = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    other = LlamaForCausalLM.from_pretrained(folder / reference, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]

    def logprobs(model, messages):
        rendered = tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        ids, mask = torch.tensor(rendered["input_ids"]), torch.tensor(rendered["assistant_masks"]).bool()
        scores = model(ids[None]).logits[0, :-1].log_softmax(-1)
        return scores.gather(1, ids[1:, None])[:, 0][mask[1:]].sum()

    found = []
    for step in range(steps):
        total = 0.0
        for record in records[8 * step : 8 * step + 8]:
            pi = [logprobs(policy, record[side]) for side in ("chosen", "rejected")]
            with torch.no_grad():
                ref = [logprobs(other, record[side]) for side in ("chosen", "rejected")]
            x = 0.1 * ((pi[0] - pi[1]) - (ref[0] - ref[1]))
            total = total + (-torch.nn.functional.logsigmoid(x) if kind == "sigmoid" else torch.relu(1 - x))
        (total / 8).backward()
        found.append(float(total.detach()) / 8)
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


IN_ORDER = {"data": {"shuffle": False}, "validation_split_fraction": None}
ADAM = {"optimizer": {"learning_rate": 0.003, "warmup": 0, "lr_schedule": "constant", "weight_decay": 0.0}}


@pytest.mark.slow
def test_a_run_is_torchs(folder, tmp_path):
    """Losses of three steps of AdamW: both texts in one forward pass, the mask, the gradient, the reference."""
    other = {"type": "separate", "model_path": str(folder / "other")}
    found = losses(folder, tmp_path, devices=1, reference=other, **IN_ORDER, **ADAM).series("train/loss")
    expected = torch_losses(folder, "sigmoid", 3, reference="other")
    assert abs(expected[0] - expected[2]) > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-4)


# trl counts all that is behind the prompt, so what the template marks is all of that.
ALL_BEHIND = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ 'A: ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}U: {{ message['content'] }}\n{% endif %}{% endfor %}"
)


@pytest.mark.slow
def test_the_first_steps_are_trls(folder, tmp_path):
    """trl's `DPOTrainer` on the same pairs: the losses of its first five steps."""
    trl = pytest.importorskip("trl")
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("datasets")
    from transformers import AutoTokenizer, LlamaForCausalLM

    records = [pair(n) for n in range(40)]
    ours = losses(
        folder, tmp_path, steps=5, devices=1, format={"chat_template": ALL_BEHIND}, **IN_ORDER, **ADAM
    ).series("train/loss")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = ALL_BEHIND
    tokenizer.pad_token = "<pad>"
    rows = [{"prompt": r["chosen"][:1], "chosen": r["chosen"][1:], "rejected": r["rejected"][1:]} for r in records]
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=8,
        max_steps=5,
        learning_rate=0.003,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        train_sampling_strategy="sequential",
        max_length=POSITIONS,
        disable_dropout=True,
    )
    trainer = trl.DPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager"),
        ref_model=LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager"),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(theirs) == 5 and theirs[0] - theirs[-1] > 1e-2
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


LORA = {"type": "lora", "r": 4, "alpha": 8, "zero_init_b": True, "a_init_mode": "peft"}


@pytest.mark.slow
def test_three_references_are_one(folder, tmp_path):
    kinds = {
        "adapter_base": {"type": "adapter_base"},
        "separate": {"type": "separate", "model_path": str(folder / "model")},
        "precomputed": {"type": "precomputed"},
    }
    found = {
        name: losses(folder, tmp_path / name, devices=1, adapter=LORA, reference=kind) for name, kind in kinds.items()
    }
    first = found["adapter_base"]
    assert first.series("train/loss")[0] - first.series("train/loss")[-1] > 1e-3
    for name in ("separate", "precomputed"):
        for metric in ("train/loss", "train/dpo_margin_ref", "train/dpo_chosen_reward", "eval/pairs/loss"):
            ours, theirs = found[name].series(metric), first.series(metric)
            np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=1e-6, err_msg=f"{name} {metric}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "more"),
    [
        ({"data": 2, "model": 2}, {}),
        ({"data": 4, "model": 2}, {"per_device_parallelism": 1}),
        ({"model": 2, "group": 2, "data": 2}, {}),
        ({"data": 1, "model": 1}, {}),
    ],
    ids=str,
)
def test_every_mesh_gives_the_same(folder, tmp_path, axes, more):
    count = math.prod(axes.values())
    one = losses(folder, tmp_path / "one", adapter=LORA, reference={"type": "adapter_base"})
    mesh = {"axes": axes, "shared_mapping": {"mlp": "model"}}
    from levanter.runplan import Target

    config = parse(
        TrainDpoConfig,
        overrides=document(
            folder, tmp_path / "other", adapter=LORA, reference={"type": "adapter_base"}, trainer={"mesh": mesh, **more}
        ),
    )
    plan = describe(config, Target(name="local", platform="cpu", kind="cpu", devices=count)).check()
    tracker = Logged()
    ENTRY_POINT.execute(plan, plan.mesh.build(jax.devices()[:count]), Session(run_id="run", tracker=tracker))
    np.testing.assert_allclose(tracker.series("train/loss"), one.series("train/loss"), rtol=1e-5)
