"""Scores of suffixes by transformers + torch, the long way: all logits, one softmax, one top-k, one token at a time."""

from collections.abc import Sequence

import numpy as np
import torch
import transformers


def log_pz_by_torch(
    model: transformers.LlamaForCausalLM,
    windows: np.ndarray,
    suffix: int,
    laws: Sequence[tuple[int | None, float, int | None]],
    *,
    batch: int = 16,
) -> list[np.ndarray]:
    """log p_z of each window under each law, float64 `[N]`: −inf where a token could not have been drawn.

    Args:
        model: in f32.
        windows: ids, `[N, positions]`.
        suffix: tokens at the end that are scored.
        laws: (tokens that may be drawn or None for all, temperature, how many tokens of the suffix or None for all).
        batch: windows at a time.
    """
    start = windows.shape[1] - suffix
    found: list[list[np.ndarray]] = [[] for _ in laws]
    for begin in range(0, len(windows), batch):
        ids = torch.from_numpy(windows[begin : begin + batch]).long()
        with torch.no_grad():
            all_logits = model(ids).logits[:, start - 1 : -1].double()
        for at, (top_k, temperature, first) in enumerate(laws):
            logits = all_logits[:, :first] / temperature
            if top_k is not None:
                allowed = torch.zeros_like(logits, dtype=torch.bool)
                allowed.scatter_(-1, logits.topk(top_k).indices, torch.ones_like(logits, dtype=torch.bool))
                logits = logits.masked_fill(~allowed, -torch.inf)
            targets = ids[:, start : start + logits.shape[1], None]
            found[at].append(logits.log_softmax(-1).gather(-1, targets)[..., 0].sum(-1).numpy())
    return [np.concatenate(parts) for parts in found]
