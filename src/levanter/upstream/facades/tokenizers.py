"""Our tokenizers with the calls of transformers': `tokenizer(texts, truncation=True)`, `tokenizer.pad(batch)`.

    tokenizer = converter.tokenizer
    tokenizer.pad_token, tokenizer.model_max_length = tokenizer.convert_ids_to_tokens(0), 512
    batch = tokenizer(["a text"], padding="max_length", return_tensors="np")

Calls and members that only transformers' tokenizers have are theirs, of the same definition; attributes that a script
sets (`pad_token`, `model_max_length`, `padding_side`, …) are passed on to them.
"""

import os
from collections.abc import Callable
from typing import Any

from haliax_ext.pytree import PyTree
from levanter.compat.hf.tokenizer import FastTokenizer, as_transformers, from_transformers

SETTINGS = (
    "bos_token",
    "chat_template",
    "eos_token",
    "model_max_length",
    "pad_token",
    "padding_side",
    "truncation_side",
    "unk_token",
)
"""Attributes of transformers' tokenizers that a script may set on ours."""
_CACHE = "_as_transformers"


def in_transformers(tokenizer: FastTokenizer) -> PyTree:
    """The tokenizer of transformers, with the attributes that the script has set."""
    settings = {name: vars(tokenizer)[name] for name in SETTINGS if name in vars(tokenizer)}
    known = vars(tokenizer).get(_CACHE)
    if known is None or known[0] != settings:
        theirs = as_transformers(tokenizer)
        for name, value in settings.items():
            setattr(theirs, name, value)
        known = (settings, theirs)
        vars(tokenizer)[_CACHE] = known
    return known[1]


def __getattr__(name: str) -> Callable[[FastTokenizer], Any]:
    """The function of a tokenizer that reads a member of transformers'."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda tokenizer: getattr(in_transformers(tokenizer), name)


def operator(tokenizer: FastTokenizer) -> Callable[..., Any]:
    """`tokenizer(texts, …)`."""
    return lambda name, *args, **keys: getattr(in_transformers(tokenizer), name)(*args, **keys)


def pad_token_id(tokenizer: FastTokenizer) -> int | None:
    """The id of the padding token, or of the one that a script has set as such."""
    return in_transformers(tokenizer).pad_token_id if "pad_token" in vars(tokenizer) else tokenizer.pad_id


def byte_length_of_token(tokenizer: PyTree, idx: int) -> int:
    """The bytes that a token stands for; 0 for a special one."""
    ours = tokenizer if isinstance(tokenizer, FastTokenizer) else from_transformers(tokenizer)
    special = (
        in_transformers(ours).all_special_ids if isinstance(tokenizer, FastTokenizer) else tokenizer.all_special_ids
    )
    return 0 if idx in special else int(ours.byte_lengths()[idx])


def num_cpus_used_by_tokenizer(tokenizer: PyTree) -> int:
    """The number of CPUs that a call uses: fast tokenizers work in parallel unless TOKENIZERS_PARALLELISM is off."""
    off = os.environ.get("TOKENIZERS_PARALLELISM", "true").lower() in ("off", "false", "f", "no", "n", "0")
    return 1 if off or not getattr(tokenizer, "is_fast", False) else os.cpu_count() or 1
