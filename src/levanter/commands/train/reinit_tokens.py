"""`reinit_tokens`: which rows of a checkpoint's embedding table and output head are reinitialized."""

from haliax_ext.abstract import leaves
from levanter.commands.train.config import TrainLmConfig
from levanter.data import Tokenizer
from levanter.models.base import LmHeadModel
from levanter.models.param_groups import EMBEDDING, HEAD, parameter_group
from levanter.trainer.adapter_state import Adapted
from levanter.trainer.reinit_rows import VOCAB, RenewedRows
from levanter.trainer.trainable import Partition

KEY = "reinit_tokens"


def resolve_reinit_rows(
    config: TrainLmConfig,
    module: LmHeadModel,
    *,
    tokenizer: Tokenizer | None,
    vocab: int,
    partition: Partition,
    adapted: Adapted | None,
) -> RenewedRows | None:
    """The rows to reinitialize; None for none.

    Args:
        config: the run.
        module: the model, abstract.
        tokenizer: of its tokens; None if it is not available, in which case their ids are unknown.
        vocab: size of the vocabulary.
        partition: which of the model's own parameters are trained.
        adapted: the adapters that are trained; None for none.

    Raises:
        ValueError: a string is not a single token, or its rows are frozen; lists all problems.
    """
    tokens = config.reinit_tokens or ()
    if not isinstance(tokens, list | tuple) or not tokens:
        return None
    wanted = {EMBEDDING: config.reinit_embeddings, HEAD: config.reinit_lm_head}
    # Leaves with a vocabulary axis: the embedding table, and the head unless it is tied to the table.
    chosen = [leaf for leaf in leaves(module) if VOCAB in leaf.names and wanted.get(parameter_group(leaf), False)]
    problems: list[str] = []
    for leaf in chosen:
        # New rows are random. If they were frozen, no step would ever give them a meaning.
        if not partition.trains(leaf):
            problems.append(f"{KEY}: {leaf.path} is frozen (trainer.trainable), and its new rows would stay random")
        if adapted is not None and leaf.path not in adapted.whole:
            key = "reinit_embeddings" if parameter_group(leaf) == EMBEDDING else "reinit_lm_head"
            problems.append(
                f"{KEY}: {leaf.path} is frozen while adapters are trained, so its new rows would stay random; name it "
                f"in adapter.modules_to_save, or leave it as it is with {key}: false"
            )
    # Without a tokenizer the plan still needs the number of rows; the ids then only stand in for it.
    ids = list(range(len(tokens)))
    if tokenizer is not None:
        encodings = [encoded.tolist() for encoded in tokenizer.encode_batch(list(tokens))]
        multi_token = [token for token, encoding in zip(tokens, encodings, strict=True) if len(encoding) != 1]
        if multi_token:
            problems.append(f"{KEY}: {', '.join(map(repr, multi_token))}: no single token of {tokenizer.name}")
        # An empty encoding has no first id; it is listed among the problems already.
        ids = [encoding[0] for encoding in encodings if encoding]
    if not chosen:
        problems.append(f"{KEY}: reinit_embeddings and reinit_lm_head exclude every row, so nothing is reinitialized")
    if problems:
        raise ValueError("\n".join(problems))
    return RenewedRows(paths=tuple(leaf.path for leaf in chosen), ids=tuple(ids), vocab=vocab)
