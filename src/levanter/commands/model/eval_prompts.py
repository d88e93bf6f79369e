"""How a model is asked questions of the harness: its tokenizer's rules, its template, what a batch of rows costs."""

from typing import Literal

from levanter.commands.model.scoring_common import beyond_context
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.data import Tokenizer
from levanter.data.chat import ChatTemplate
from levanter.eval.harness.batch_shapes import RowLimits
from levanter.eval.harness.encoding import HarnessError, QueryEncoder
from levanter.eval.harness.packing import RowShape
from levanter.mesh import ResolvedMesh
from levanter.models.registry import LmConfig
from levanter.runplan import Check


def question_encoder(tokenizer: Tokenizer | None, length: int) -> tuple[QueryEncoder | None, list[Check]]:
    """Texts as questions of at most so many tokens; None where there is no tokenizer."""
    if tokenizer is None:
        return None, []
    adds = isinstance(tokenizer, FastTokenizer) and tokenizer.adds_bos
    said = "BOS is put before a text" if adds else "nothing is put before a text"
    check = Check(name="encoding", status="ok", message=f"{said}, as the tokenizer's files say")
    return QueryEncoder(tokenizer, adds, length), [check]


def conversation_template(tokenizer: object, *, asked: bool) -> tuple[ChatTemplate | None, list[Check]]:
    """What writes conversations.

    Args:
        tokenizer: the model's; None where there is none.
        asked: whether conversations are to be written.
    """
    if not isinstance(tokenizer, FastTokenizer) or tokenizer.chat_template is None:
        if not asked or tokenizer is None:
            return None, []
        error = HarnessError(
            "eval_harness.apply_chat_template: the tokenizer has no chat template\n"
            "  → leave it out, or name a tokenizer that has one (tokenizer: …)"
        )
        return None, [Check(name="chat template", status="error", message=str(error), error=error)]
    bos, eos = ("" if i is None else tokenizer.token(i) or "" for i in (tokenizer.bos_id, tokenizer.eos_id))
    return ChatTemplate(text=tokenizer.chat_template, bos_token=bos, eos_token=eos, where="eval_harness"), []


def question_length(asked: int | None, model: LmConfig, most: int) -> tuple[int, list[Check]]:
    """Tokens that a model sees at once.

    Args:
        asked: `eval_harness.max_length`.
        model: the architecture.
        most: where nothing is asked for.
    """
    length = asked or min(model.max_seq_len, most)
    if asked is None and length < model.max_seq_len:
        said = (
            f"the model sees {length:,} tokens at once, of the {model.max_seq_len:,} that it was trained on "
            "(eval_harness.max_length): of longer requests the beginning is dropped, longer texts are cut into windows"
        )
        return length, [Check(name="length", status="note", message=said)]
    if length <= model.max_seq_len:
        return length, []
    said = f"eval_harness.max_length: {length:,} tokens"
    return length, beyond_context(model, said, name="length", advice="eval_harness.max_length:")


def sampling_checks(*, logged: bool) -> list[Check]:
    """What is said of upstream's `sample_logging`."""
    said = "eval_harness.sample_logging: samples are written into files, not sent to trackers"
    return [Check(name="samples", status="note", message=said)] if logged else []


def rows_reach(model: LmConfig, resolved: ResolvedMesh, platform: str, *, length: int, tokens: int) -> tuple[int, bool]:
    """Positions of the longest rows, and whether segments may go on from others there.

    Sequences that begin alike share what they begin with where attention is a formula: the kernel for TPUs, and what
    attends where positions are cut, know one segment for a query. A row may then be longer than what the model sees at
    once, for its segments are not: twice that, if a batch has the tokens and the model reads short segments alike.

    Args:
        model: the architecture.
        resolved: the mesh.
        platform: of the devices.
        length: tokens that the model sees at once.
        tokens: of a batch on each of its shards.
    """
    if platform == "tpu" or resolved.position_ways > 1:
        return length, False
    longest = max(length, min(tokens, 2 * length))
    return (longest if model.reads_alike(length, longest) else length), True


def reading_checks(model: LmConfig, longest: int) -> list[Check]:
    """Says so where it matters how long a row is.

    Args:
        model: the architecture.
        longest: positions of the longest rows.
    """
    if model.reads_alike(1, longest):
        return []
    said = (
        "rotary embeddings of this kind depend on how long the whole sequence is; in rows of up to "
        f"{longest:,} positions short requests are read as parts of a long one, as in a padded batch\n"
        "  → eval_harness.max_length: what the model was first trained on, where requests are no longer than that"
    )
    return [Check(name="rotary", status="note", message=said)]


def rows_room(resolved: ResolvedMesh, platform: str) -> RowLimits:
    """What rows may be on a platform: of any length on CPUs, in pieces of 128 elsewhere, as hardware multiplies them.

    Where positions are cut, each shard has two pieces (one of the beginning, one of the end).
    """
    on_cpu = platform == "cpu"
    cut = 2 * resolved.position_ways if resolved.position_ways > 1 else 1
    # Beyond CPUs a batch has costs that its rows do not: the weights are gathered for each.
    unit, (fewer, larger) = (1 if on_cpu else 128) * cut, (2.0, 4.0) if on_cpu else (1.0, 1.0)
    return RowLimits(num_shards=resolved.batch_ways, multiple=unit, max_batch_factor=fewer, max_row_factor=larger)


def rows_flops(model: LmConfig, vocab: int, shape: RowShape, attention: Literal["causal", "full"]) -> float:
    """FLOPs of a batch: every position through the blocks, the slots through the head.

    Args:
        model: the architecture.
        vocab: rows of the head.
        shape: of the batch.
        attention: over the causal half of the pairs of positions, or over all.
    """
    body = 2.0 * model.matmul_parameters(0)
    head = 2.0 * model.matmul_parameters(vocab) - body
    each = model.flops(vocab_size=vocab, context_length=shape.length, attention=attention)
    return shape.rows * (shape.length * (body + each.attention) + shape.slots * head)
