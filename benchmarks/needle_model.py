"""Makes the model of `make demo-needle`: a Llama of two layers that finds needles in 512 tokens, and in no more.

    python benchmarks/needle_model.py config/needles/tiny

It takes some ten minutes on two cores. What has to be learned is to copy: to find where the last token stood before,
and to say what followed it there. That takes two layers, of which the first must know of each position which token
stands before it; nothing rewards that by itself until the second one uses it. So the first layer is asked for it, by
a matrix of its own that is thrown away, while sequences of 64 tokens are copied. Longer ones and needles follow. The
model is plain JAX, and is written as transformers' Llama.
"""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from levanter.eval.needles import haystack
from levanter.eval.needles.training_docs import OTHER_WEIGHT, token_weights, training_document

END, UNKNOWN = "<|endoftext|>", "<|unknown|>"
WIDTH, HEADS, MLP, LAYERS, THETA, EPSILON = 128, 2, 128, 2, 10_000.0, 1e-5
PAIRS = tuple(f"{n:02}" for n in range(100))
_PIECES = r"\d{1,2}|[A-Za-z]+|[^\sA-Za-z\d]"
_SAID = """
A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number
afterwards. Some special magic numbers are hidden within the following text. What is the special magic number for
mentioned in the provided text? The are all and One of the is: , - What are all the
special magic numbers for . ! ' " ( )
"""


def tokenizer() -> dict[str, Any]:
    """Words of the templates, and numbers of up to two digits; everything else is unknown."""
    lists = (haystack.ADJECTIVES, haystack.NOUNS, haystack.VERBS, haystack.LOCATIONS)
    said = " ".join([_SAID, *haystack.NOISE, *(" ".join(each) for each in lists), "The the"])
    words = list(dict.fromkeys(re.findall(_PIECES, said)))
    numbers = [f"{n:0{digits}}" for digits in (1, 2) for n in range(10**digits)]
    vocab = {word: n for n, word in enumerate(dict.fromkeys([END, UNKNOWN, *words, *numbers]))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": 0, "content": END, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": _PIECES}, "behavior": "Removed", "invert": True},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": UNKNOWN},
    }


def write(folder: Path, weights: Mapping[str, Any], vocab: int) -> None:
    """The model as transformers reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(), indent=0) + "\n")
    named = {"eos_token": END, "unk_token": UNKNOWN, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named) + "\n")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPSILON,
        "hidden_act": "silu",
        "rope_theta": THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    named_there = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "before_attention": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
    }
    tensors = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm"]}
    for n, layer in enumerate(weights["layers"]):
        tensors |= {f"model.layers.{n}.{named_there[name]}.weight": each.T for name, each in layer.items()}
    arrays = {name: np.ascontiguousarray(each, np.float32) for name, each in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def start(random: np.random.Generator, vocab: int) -> dict[str, Any]:
    """Random weights."""

    def matrix(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(random.normal(size=(rows, columns)) * scale / math.sqrt(rows), jnp.float32)

    def layer() -> dict[str, jax.Array]:
        made = {name: matrix(WIDTH, WIDTH, 0.5 if name == "o" else 1.0) for name in "qkvo"}
        made |= {"gate": matrix(WIDTH, MLP), "up": matrix(WIDTH, MLP), "down": matrix(MLP, WIDTH, 0.5)}
        return made | {name: jnp.ones(WIDTH) for name in ("before_attention", "before_mlp")}

    table = jnp.asarray(0.1 * random.normal(size=(vocab, WIDTH)), jnp.float32)
    layers = [layer() for _ in range(LAYERS)]
    return {"embedding": table, "norm": jnp.ones(WIDTH), "layers": layers, "before": matrix(WIDTH, WIDTH)}


def activations(weights: Mapping[str, Any], ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Those that the head takes, and those behind the attention of the first layer; `[row, position, width]`."""
    rows, length = ids.shape
    size = WIDTH // HEADS
    angles = np.arange(length)[:, None] * THETA ** (-np.arange(0, size, 2) / size)[None]
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[:, None] for f in (np.cos, np.sin))
    seen = jnp.where(np.tril(np.ones((length, length), bool)), 0.0, -1e9).astype(jnp.float32)

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(rows, length, HEADS, size)

    def turned(x: jax.Array) -> jax.Array:
        a, b = jnp.split(heads(x), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x, first = weights["embedding"][ids], None
    for layer in weights["layers"]:
        y = _normed(x, layer["before_attention"])
        q, k, v = turned(y @ layer["q"]) / math.sqrt(size), turned(y @ layer["k"]), heads(y @ layer["v"])
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k) + seen
        attended = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v).reshape(rows, length, WIDTH)
        x = x + attended @ layer["o"]
        first = x if first is None else first
        y = _normed(x, layer["before_mlp"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    assert first is not None
    return _normed(x, weights["norm"]), first


def _normed(x: jax.Array, weight: jax.Array | float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON) * weight


def loss(
    weights: Mapping[str, Any], ids: jax.Array, counts: jax.Array, *, asks_before: float
) -> tuple[jax.Array, jax.Array]:
    """Nats per token that counts, and what the first layer does not know of the tokens before; how many are right."""
    x, first = activations(weights, ids[:, :-1])
    logits = x @ weights["embedding"].T
    targets, counts = ids[:, 1:], counts[:, 1:]
    total = jnp.sum(_nats(logits, targets) * counts) / jnp.sum(counts)
    answers = counts > 0.5
    right = jnp.sum((jnp.argmax(logits, -1) == targets) & answers) / jnp.sum(answers)
    if asks_before:
        table = jax.lax.stop_gradient(weights["embedding"])
        known = (_normed(first, 1.0) @ weights["before"])[:, 1:] @ table.T
        total += asks_before * jnp.mean(_nats(known, ids[:, :-2]))
    return total, right


def _nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    at = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - at


Row = tuple[np.ndarray, np.ndarray]
Make = Callable[[np.random.Generator, int], Row]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is learned from: ids, and how much each counts."""

    tokenizer: Tokenizer

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """A text's ids, and the span of each."""
        found = self.tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(found.ids, np.int32), np.asarray(found.offsets).reshape(-1, 2)

    def ids(self, words: tuple[str, ...]) -> np.ndarray:
        """Of words of the vocabulary."""
        return np.asarray([self.tokenizer.token_to_id(word) for word in words])

    def copies(self, random: np.random.Generator, length: int) -> Row:
        """A few tokens over and over, others between; all but the first of each copy can be known."""
        any_token = np.arange(2, self.tokenizer.get_vocab_size())
        count = int(random.integers(3, length // 2 + 1))
        copied = any_token[random.integers(len(any_token), size=count)]
        if random.random() < 0.3:
            copied = self.ids(PAIRS)[random.integers(len(PAIRS), size=count)]
        ids, counts = np.zeros(0, int), np.zeros(0)
        while len(ids) < length:
            between = any_token[random.integers(len(any_token), size=int(random.integers(max(1, min(8, length // 8)))))]
            known = np.full(count, float(len(counts) > 0))
            known[0] = 0.0
            ids = np.concatenate([ids, between, copied])
            counts = np.concatenate([counts, np.zeros(len(between)), known])
        return ids[:length], counts[:length]

    def pairs(self, random: np.random.Generator, length: int) -> Row:
        """Names and their numbers, then some of the names again and again."""
        listed = [self._pair(random) for _ in range(int(random.integers(1, max(2, length // 18) + 1)))]
        ids, counts, n = np.zeros(0, int), np.zeros(0), 0
        while len(ids) < length:
            ids = np.concatenate([ids, listed[n if n < len(listed) else int(random.integers(len(listed)))]])
            counts = np.concatenate([counts, [OTHER_WEIGHT] * 4, [float(n >= len(listed))] * 4, [OTHER_WEIGHT]])
            n += 1
        return ids[:length], counts[:length]

    def _pair(self, random: np.random.Generator) -> np.ndarray:
        adjective, noun = (of[random.integers(len(of))] for of in (haystack.ADJECTIVES, haystack.NOUNS))
        number = [PAIRS[random.integers(10, 100)], *(PAIRS[n] for n in random.integers(0, 100, 2))]
        return self.ids((adjective, "-", noun, ":", *number, str(random.integers(10)), "."))

    def needles(self, random: np.random.Generator, length: int) -> Row:
        """Needles and nothing else, then the same ones again in another order."""
        count = int(random.integers(2, max(3, length // 26)))
        names, values = haystack.keys(random, count), haystack.numbers(random, count)
        text, spans = "", []
        for n in [*range(count), *random.permutation(count).tolist()]:
            again = len(spans) >= count
            text += f"{'The' if again else 'One of the'} special magic number{'' if again else 's'} for {names[n]} is: "
            spans.append((len(text), len(text) + len(values[n])))
            text += f"{values[n]}. "
        ids, offsets = self.encode(text)
        return ids[:length], token_weights(offsets, spans[count:])[:length]

    def texts(self, random: np.random.Generator, length: int) -> Row:
        """Needles in hay, and questions after them."""
        return training_document(random, self.encode, length)

    def batch(self, random: np.random.Generator, rows: int, length: int, mix: Mapping[str, float]) -> Row:
        """Rows of these kinds, `[row, length + 1]`; padding does not count."""
        ids, counts = np.zeros((rows, length + 1), np.int32), np.zeros((rows, length + 1), np.float32)
        shares = np.asarray(list(mix.values()))
        for n, kind in enumerate(random.choice(list(mix), size=rows, p=shares / shares.sum())):
            make: Make = getattr(self, kind)
            some, known = make(random, length + 1)
            ids[n, : len(some)], counts[n, : len(known)] = some, known
        return ids, counts


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps on rows of one length, the rate from one to another; it ends early where `enough` answers are right."""

    rows: int
    length: int
    steps: int
    rates: tuple[float, float]
    mix: Mapping[str, float]
    enough: float = 2.0
    asks_before: float = 0.0


MIX = {"copies": 0.3, "pairs": 0.3, "needles": 0.4}
MIX_OF_TEXTS = {"texts": 0.6, "needles": 0.2, "copies": 0.1, "pairs": 0.1}
PHASES = (
    Phase(rows=128, length=64, steps=600, rates=(3e-3, 2e-3), mix={"copies": 1.0}, enough=0.93, asks_before=0.5),
    Phase(rows=48, length=128, steps=300, rates=(2e-3, 2e-3), mix=MIX, enough=0.97),
    Phase(rows=8, length=512, steps=400, rates=(2e-3, 3e-4), mix=MIX_OF_TEXTS),
)
WARM_UP, SHOWN = 40, 20


def trained(seed: int = 0) -> tuple[dict[str, Any], int]:
    """Weights, and the size of the vocabulary."""
    rows = Rows(tokenizer=Tokenizer.from_str(json.dumps(tokenizer())))
    vocab = rows.tokenizer.get_vocab_size()
    weights = start(np.random.default_rng(seed), vocab)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.inject_hyperparams(optax.adamw)(learning_rate=0.0, b2=0.98, weight_decay=0.0),
    )
    state: Any = optimizer.init(weights)
    random, taken, began = np.random.default_rng(seed + 1), 0, time.monotonic()

    @partial(jax.jit, donate_argnums=(0, 1), static_argnames="asks_before")
    def step(weights: Any, state: Any, ids: jax.Array, counts: jax.Array, *, asks_before: float) -> Any:
        of = partial(loss, asks_before=asks_before)
        found, gradient = jax.value_and_grad(of, has_aux=True)(weights, ids, counts)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, jnp.stack(found)

    for phase in PHASES:
        found = []
        for n in range(phase.steps):
            rate = np.interp(n / phase.steps, (0, 1), phase.rates) * min(1.0, (taken + 1) / WARM_UP)
            state[1].hyperparams["learning_rate"] = jnp.float32(rate)
            batch = rows.batch(random, phase.rows, phase.length, phase.mix)
            weights, state, now = step(weights, state, *batch, asks_before=phase.asks_before)
            found, taken = [*found, now][-SHOWN:], taken + 1
            if (n + 1) % SHOWN == 0:
                nats, right = np.mean(found, axis=0)
                said = f"{phase.length} tokens, step {n + 1}: loss {nats:.3f}, {right:.1%} of the answers are right"
                print(f"{said}; {time.monotonic() - began:.0f} s", flush=True)
                if right > phase.enough:
                    break
    return jax.tree.map(np.asarray, weights), vocab


if __name__ == "__main__":
    write(Path(sys.argv[1]), *trained())
