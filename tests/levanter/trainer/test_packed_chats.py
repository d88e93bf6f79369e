"""Conversations that share a row lose, and teach, what they do alone: in one pass, and in a row of their own each."""

import json

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from helpers.hf_folder import byte_level_tokenizer

from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data import TrainRows, build_training, next_tokens
from levanter.data.config import DatasetComponent, LmDataConfig
from levanter.data.formats import ChatLmDatasetFormat
from levanter.data.sources import UrlDatasetSource
from levanter.models.gpt2.config import Gpt2Config
from levanter.models.llama.config import LlamaConfig
from levanter.trainer.loss import LmBatch, LmObjective
from levanter.trainer.objective import AtStep

TEMPLATE = (
    "{% for m in messages %}{{ m.role + '\n' }}{{ m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
POSITIONS, VOCAB = 96, 300
SIZES = dict(max_seq_len=POSITIONS, hidden_dim=16, num_layers=1, num_heads=2)
MODELS = [
    pytest.param(Gpt2Config(**SIZES), id="gpt2, learned positions"),  # pyright: ignore
    pytest.param(
        LlamaConfig(**SIZES, num_kv_heads=1, intermediate_dim=24),  # pyright: ignore
        id="llama",
        marks=pytest.mark.slow,
    ),
]


def rows(tmp_path, pack):
    talks = [
        [("user", "the cat?"), ("assistant", "sat on the mat"), ("user", "and?"), ("assistant", "didn't it")],
        [("system", "x + 1"), ("user", "def f(x)"), ("assistant", "return x")],
        [("user", "12345"), ("assistant", "x" * 9)],
        [("user", "the"), ("assistant", "mat, 日本")],
    ]
    path = tmp_path / "talk.jsonl"
    records = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in talks]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    component = DatasetComponent(
        source=UrlDatasetSource(train_urls=[str(path)]), format=ChatLmDatasetFormat(chat_template=TEMPLATE), pack=pack
    )
    built = byte_level_tokenizer(VOCAB)
    tokenizer = FastTokenizer(json.loads(built.to_str()), name="made here", bos_id=1, eos_id=2, pad_id=0)
    config = LmDataConfig(components={"talk": component}, cache_dir=None, shuffle=False)
    (one,) = build_training(config, tokenizer, positions=POSITIONS, batch_sizes=[(0, 1)], seed=0).sets
    return one.rows.take(np.arange(len(one.rows)))


@pytest.mark.parametrize("config", MODELS)
def test_packed_is_the_sum_of_unpacked(tmp_path, config):
    model = config.build(Axis("vocab", VOCAB), key=jax.random.PRNGKey(0))

    def minimized(model, batch):
        return LmObjective().total(model, batch, AtStep(step=jnp.int32(0)), jnp.float32(1.0))[0]

    compiled = jax.jit(jax.value_and_grad(minimized))

    def of(given):
        rows = TrainRows.empty(4, POSITIONS)
        rows.put(np.arange(len(given.tokens)), given)
        axes = (Axis("batch", 4), Axis("position", POSITIONS))
        targets = next_tokens(rows.tokens, rows.segment_ids)
        arrays = (rows.tokens, targets, rows.loss_weights, rows.segment_ids)
        batch = LmBatch(*(hax.named(jnp.asarray(each), axes) for each in arrays))
        return compiled(model, batch)

    packed, alone = rows(tmp_path, True), rows(tmp_path, "pad")
    assert len(packed.tokens) < len(alone.tokens) == 4 and packed.segment_ids.max() >= 1
    (loss, gradient), (expected, theirs) = of(packed), of(alone)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5) and float(loss) > 10
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(theirs), strict=True):
        scale = float(jnp.linalg.norm(other))
        np.testing.assert_allclose(one, other, atol=1e-5 * max(scale, 1e-3), rtol=0)
