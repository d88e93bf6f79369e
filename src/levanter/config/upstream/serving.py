"""Upstream's keys of a server: `service`, the engine's block, and the defaults of a request at the top of a document.

Both generations have them in the configuration of `InferenceServer`, which a user's script starts. Other entry points
that generate have keys of the same names, so the class that reads a document decides whether it is a server's.
"""

from collections.abc import Collection

from levanter.config.upstream.changes import Draft, Keys, OldKey, inline
from levanter.config.upstream.entry_points import LOGPROBS, PAGE_TOKENS, PAGES
from levanter.config.yaml_nodes import Entry, MapNode, to_plain

BLOCK: Keys = ("service",)
SERVES = "drain_seconds"
"""A key that the class of a server has at the top, and no other."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
"""Short names of `compute_dtype`."""
MOST_STEPS = 8
"""Tokens that a row gets in a call at most."""


def _service(name: str, new: str, why: str, default: str = "") -> OldKey:
    return OldKey(block="service", name=name, new=new, why=why, default=default)


TEMPERATURE = OldKey(
    block="",
    name="temperature",
    new="sampling.temperature (of a server)",
    why="the defaults of requests are a block",
    default="0.7",
)
SEED = OldKey(
    block="",
    name="seed",
    new="sampling.seed (of a server)",
    why="requests without a seed use this one; without it each gets a new one",
    default="42",
)
ROWS = _service("max_seqs", "inference.max_rows", "a running sequence is a row", "256")
STEPS = _service("max_rounds", f"inference.steps, {MOST_STEPS} at most", "tokens per row and call", "32")
LENGTH = _service("max_seq_len", "inference.max_seq_len", "rows are described in one block")
CHUNK = _service("max_prefill_size", "inference.prefill_chunk", "tokens of a prompt per call")
SIZE = _service("page_size", "inference.page_size", "pages are described in one block", "128")
COUNT = _service("max_pages", "inference.pages, with allocation: paged", "the cache's pages over all devices")
DTYPE = _service("compute_dtype", "inference.cache_dtype", "the dtype of keys and values", "bfloat16")
WAITING = _service("max_queued_tokens", "max_queued_tokens", "the queue belongs to the server", "512")
SERVICE_PAGES = OldKey(block="service", name=PAGES.name, new=PAGES.new, why=PAGES.why, default=PAGES.default)
SERVICE_LOGPROBS = OldKey(block="service", name=LOGPROBS.name, new="", why=LOGPROBS.why)
IGNORED = (
    SERVICE_LOGPROBS,
    _service("hbm_utilization", "", "the plan determines the size of the cache"),
    _service("max_stop_seqs", "", "there may be any number of stop strings"),
    _service("max_stop_tokens", "", "a stop string may have any number of tokens"),
    _service("seed", "", "sampling uses the request's seed"),
    _service("max_seqs_in_prefill", "", "the calls for prompts have the sizes that the plan lists"),
    _service("max_tokens_per_round", "", "the calls for prompts have the sizes that the plan lists"),
)
AT_THE_TOP = (TEMPERATURE, SEED)
"""Keys that other classes have, too; they are not suggested for misspelt ones."""
SERVER_KEYS = (*AT_THE_TOP, ROWS, STEPS, LENGTH, CHUNK, SIZE, COUNT, DTYPE, WAITING, SERVICE_PAGES, *IGNORED)


def translate_server(draft: Draft, takes: Collection[str]) -> None:
    """Translates a server's document, where the class that reads it serves."""
    if SERVES not in takes:
        return
    # Other commands have these keys at the top as well, so they are translated only for a server.
    for row in AT_THE_TOP:
        entry = draft.entry((row.name,))
        if entry is not None:
            draft.move(row, entry, (), [(("sampling", row.name), entry.node)])
    _pages_of_a_row(draft)
    _moved(draft)
    for row in IGNORED:
        entry = draft.entry((*BLOCK, row.name))
        if entry is not None:
            draft.ignore(row, entry, BLOCK)
    remaining = draft.entry(BLOCK)
    if remaining is not None and isinstance(remaining.node, MapNode):
        known = [row.name for row in SERVER_KEYS if row.block == "service"]
        # Whatever is left in `service` is in no table.
        for item in remaining.node:
            draft.wrong(item, f"service.{item.key}", f"unknown key; the keys here are {', '.join(known)}")
        draft.remove(BLOCK)


def _moved(draft: Draft) -> None:
    """The keys that `inference` has, by other names or with other bounds."""
    renamed = {ROWS: "max_rows", LENGTH: "max_seq_len", CHUNK: "prefill_chunk", SIZE: "page_size"}
    for row, name in renamed.items():
        if (entry := _requested(draft, row)) is not None:
            draft.move(row, entry, BLOCK, [(("inference", name), entry.node)])
    if (entry := _requested(draft, STEPS)) is not None:
        rounds = to_plain(entry.node)
        most = min(rounds, MOST_STEPS) if isinstance(rounds, int) and not isinstance(rounds, bool) else entry.node
        draft.move(STEPS, entry, BLOCK, [(("inference", "steps"), most)])
    if (entry := _requested(draft, COUNT)) is not None:
        draft.move(COUNT, entry, BLOCK, [(("inference", "allocation"), "paged"), (("inference", "pages"), entry.node)])
    if (entry := _requested(draft, DTYPE)) is not None:
        dtype = to_plain(entry.node)
        draft.move(DTYPE, entry, BLOCK, [(("inference", "cache_dtype"), DTYPES.get(str(dtype), dtype))])
    if (entry := _requested(draft, WAITING)) is not None:
        draft.move(WAITING, entry, BLOCK, [((WAITING.name,), entry.node)])


def _requested(draft: Draft, row: OldKey) -> Entry | None:
    """The entry of a key; one that is null sets nothing and is removed."""
    entry = draft.entry((*BLOCK, row.name))
    if entry is not None and to_plain(entry.node) is None:
        draft.move(row, entry, BLOCK, [])
        return None
    return entry


def _pages_of_a_row(draft: Draft) -> None:
    """Translates the number of pages of a row into a length in tokens."""
    entry = _requested(draft, SERVICE_PAGES)
    if entry is None:
        return
    count = to_plain(entry.node)
    size = draft.entry((*BLOCK, SIZE.name))
    tokens = PAGE_TOKENS if size is None else to_plain(size.node)
    if isinstance(count, int) and isinstance(tokens, int) and not isinstance(count, bool):
        draft.move(SERVICE_PAGES, entry, BLOCK, [(("inference", "max_seq_len"), count * tokens)])
    else:
        draft.wrong(entry, f"service.{SERVICE_PAGES.name}", f"expected an integer, got {inline(entry.node)}")
        draft.remove((*BLOCK, SERVICE_PAGES.name))
