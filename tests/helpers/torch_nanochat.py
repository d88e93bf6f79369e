"""nanochat in torch, written from its formulas: the judge of the family. One tensor for each layer and name.

`tensors` has the names of our own checkpoint form (`model.layers.3.self_attn.q_proj.weight`), `[out, in]`.
"""

import numpy as np
import torch
import torch.nn.functional as F

from levanter.models.nanochat.config import NanochatConfig


def rms_norm(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def turned(x: torch.Tensor, base: float) -> torch.Tensor:
    """Queries or keys `[batch, position, head, feature]`, turned by −θ."""
    length, size = x.shape[1], x.shape[3]
    angles = torch.outer(torch.arange(length).float(), base ** (-torch.arange(0, size, 2).float() / size))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


def windows(config: NanochatConfig, pattern: str, short: int) -> list[int | None]:
    """How many earlier tokens each layer sees; None for all."""
    letters = (pattern * config.num_layers)[: config.num_layers - 1] + "L"
    return [short if letter == "S" else None for letter in letters]


def attention(t, n: int, x: torch.Tensor, ids: torch.Tensor, config: NanochatConfig, window: int | None):
    name = f"model.layers.{n}.self_attn"
    batch, length, _ = x.shape
    size = config.hidden_dim // config.num_heads

    def heads(projection: str, count: int) -> torch.Tensor:
        return (x @ t[f"{name}.{projection}.weight"].T).view(batch, length, count, size)

    q, k = heads("q_proj", config.num_heads), heads("k_proj", config.num_kv_heads)
    v = heads("v_proj", config.num_kv_heads)
    if f"{name}.value_embedding.table" in t:
        rows = t[f"{name}.value_embedding.table"][ids].view(v.shape)
        gate = 3 * torch.sigmoid(x[..., :12] @ t[f"{name}.value_embedding.gate.weight"].T)
        v = v + gate[..., None] * rows
    base, epsilon = config.rope.theta, config.layer_norm_epsilon
    q, k = (rms_norm(turned(y, base), epsilon) * config.query_key_gain for y in (q, k))
    group = config.num_heads // config.num_kv_heads
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    sees = (distance >= 0) & (distance <= (length if window is None else window))
    scores = torch.einsum("bqhf,bkhf->bhqk", q, k) / size**0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    mixed = torch.einsum("bhqk,bkhf->bqhf", weights, v).reshape(batch, length, -1)
    return mixed @ t[f"{name}.o_proj.weight"].T


def logits(t, ids: torch.Tensor, config: NanochatConfig, *, pattern: str = "SSSL", short: int = 64) -> torch.Tensor:
    epsilon = config.layer_norm_epsilon
    x = rms_norm(t["model.embed_tokens.weight"][ids], epsilon)
    if "model.smear.scale" in t:
        gate = t["model.smear.scale"] * torch.sigmoid(x[:, 1:, :24] @ t["model.smear.gate.weight"])
        x = torch.cat([x[:, :1], x[:, 1:] + gate[..., None] * x[:, :-1]], 1)
    first, middle = x, None
    for n, window in enumerate(windows(config, pattern, short)):
        if f"model.layers.{n}.stream_scale" in t:
            x = t[f"model.layers.{n}.stream_scale"] * x + t[f"model.layers.{n}.x0_scale"] * first
        x = x + attention(t, n, rms_norm(x, epsilon), ids, config, window)
        inside = (rms_norm(x, epsilon) @ t[f"model.layers.{n}.mlp.fc1.weight"].T).relu().square()
        x = x + inside @ t[f"model.layers.{n}.mlp.fc2.weight"].T
        middle = x if n == config.num_layers // 2 else middle
    if "model.backout_scale" in t:
        x = x - t["model.backout_scale"] * middle
    z = rms_norm(x, epsilon) @ t["lm_head.weight"].T
    return 15 * torch.tanh(z / 15)


def loss_and_gradients(tensors, ids: np.ndarray, config: NanochatConfig, **how) -> tuple[float, dict[str, np.ndarray]]:
    """The mean negative log-likelihood of the next tokens, and its gradients by name."""
    t = {name: torch.tensor(array, requires_grad=True) for name, array in tensors.items()}
    tokens = torch.from_numpy(ids.astype(np.int64))
    z = logits(t, tokens, config, **how)[:, :-1]
    loss = F.cross_entropy(z.reshape(-1, z.shape[-1]), tokens[:, 1:].reshape(-1))
    loss.backward()
    return loss.item(), {name: x.grad.numpy() for name, x in t.items()}
