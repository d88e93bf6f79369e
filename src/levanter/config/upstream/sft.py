"""Documents of `sft` and `sft_mixture`, two commands of supervised fine-tuning that `train_lm` has replaced.

Both trained on pairs. With `dataset_type: chat_jsonl` a pair was the first message of `input_role` and the first one of
`output_role` of a conversation, one after the other without a chat template, and the end of a text; the new document
has a template that writes exactly this. With `dataset_type: huggingface` it was two fields of a record. Several sets of
the Hub, of which `sft` used only the first, and additions to the vocabulary are refused.
"""

from collections.abc import Mapping

from levanter.config.upstream.changes import Change, Draft, Keys, OldKey, inline
from levanter.config.yaml_nodes import Entry, MapNode, Node, from_plain, to_plain

SFT, MIXTURE = "sft", "sft_mixture"
"""The generations of documents that are translated here, as `EARLIER` of a configuration class names them."""
CHAT, HUB = "chat_jsonl", "huggingface"
ONE = "chat"
"""The name of the component that `chat_train_urls` becomes."""
PAIR = (
    "{{ bos_token }}{{ (messages | selectattr('role', 'equalto', 'user') | first).content }}{% generation %}"
    "{{ (messages | selectattr('role', 'equalto', 'assistant') | first).content }}{{ eos_token }}{% endgeneration %}"
)
"""The template of the part of a conversation that was trained on."""
MODEL_NAME = "NousResearch/Llama-2-7b-hf"
"""The default of both `model_name_or_path` and `tokenizer`."""
_PACKED = 4
_PAIRS = "a pair is the first question and the first answer, without a chat template: the template writes just that"


def _row(name: str, new: str, why: str, default: str = "") -> OldKey:
    return OldKey(block="", name=name, new=new, why=why, default=default)


MODEL_KEY = _row("model_name_or_path", "initialize_from_hf", "the initial checkpoint is named once", MODEL_NAME)
INITIALIZE = _row("initialize_from_hf", "initialize_from_hf, use_hf_model_config", "its architecture is used, too")
TOKENIZER = _row("tokenizer", "data.tokenizer", "the tokenizer belongs to `data:`", MODEL_NAME)
LENGTH = _row("max_seq_len", "train_seq_len", "each run chooses its own length", "2048")
KIND = _row("dataset_type", "format.type of each component", "data sets are components, each with a format", CHAT)
URLS = _row("chat_train_urls", f"data.components.{ONE}", "data sets are components")
MESSAGES = _row("messages_field", "format.messages_field of each component", "it is a key of the format")
INPUT = _row("input_role", "format.roles of each component", "roles have the names that templates know", "user")
OUTPUT = _row("output_role", "format.roles of each component", "roles have the names that templates know", "assistant")
WEIGHTS = _row("mixture_weights", "data.train_weights", "weights belong to `data:`")
BLOCK = _row("mixture_block_size", "data.mixture_block_size", "the settings of the mixture belong to `data:`")
STRATEGY = _row("stop_strategy", "data.stop_strategy", "the settings of the mixture belong to `data:`")
SFT_KEYS = (MODEL_KEY, TOKENIZER, LENGTH, KIND, URLS, MESSAGES, INPUT, OUTPUT, WEIGHTS, BLOCK, STRATEGY)
"""Keys that only `sft` and `sft_mixture` had."""
_OF_THE_HUB = {"input_field": ("input_key", "prompt"), "output_field": ("target_key", "response")}
_OF_A_SET = ("train_urls", "validation_urls", "id", "name", "splits", "streaming", "stream", "cache_dir", "tags")


def translate_sft(draft: Draft, earlier: str) -> None:
    """Translates such a document, for an entry point that was one of the two.

    Args:
        draft: the document.
        earlier: the class's `EARLIER`; "" for none.
    """
    if earlier not in (SFT, MIXTURE) or "data" in draft.document:
        return  # `train_lm`'s keys, which it takes as well
    _checkpoint(draft)
    _moved(draft, TOKENIZER, ("data", "tokenizer"), MODEL_NAME)
    _moved(draft, LENGTH, ("train_seq_len",), 2048)
    _sets(draft, earlier)
    _moved(draft, WEIGHTS, ("data", "train_weights"))
    _moved(draft, BLOCK, ("data", "mixture_block_size"))
    _moved(draft, STRATEGY, ("data", "stop_strategy"))
    shuffled = _row("(shuffle)", "data.shuffle", "pairs were read in an order of their own")
    # Written explicitly: both commands always shuffled their pairs.
    draft.set(("data", "shuffle"), True, old="shuffle", mark=draft.document.mark)
    draft.changes.append(Change(key="shuffle", was="(always)", now="data.shuffle: true", why=shuffled.why))
    steps = draft.entry(("hf_save_steps",))
    if steps is not None and to_plain(steps.node) == 0:
        draft.ignore(_row("hf_save_steps", "", "0 was the default, and no number of steps"), steps, ())


def _checkpoint(draft: Draft) -> None:
    named, initialize = draft.entry((MODEL_KEY.name,)), draft.entry((INITIALIZE.name,))
    requested = False if initialize is None else to_plain(initialize.node)
    if not requested:
        if named is not None:
            draft.ignore(_row(MODEL_KEY.name, "", "without initialize_from_hf no weights are read from it"), named, ())
        return
    assert initialize is not None
    name = requested if isinstance(requested, str) else MODEL_NAME if named is None else to_plain(named.node)
    draft.remove((MODEL_KEY.name,))
    edits: list[tuple[Keys, object]] = [((INITIALIZE.name,), name), (("use_hf_model_config",), True)]
    draft.move(INITIALIZE, initialize, (), edits)


def _moved(draft: Draft, row: OldKey, path: Keys, default: object = None) -> None:
    """A key that has another place now, with its old default where it is absent."""
    entry = draft.entry((row.name,))
    if entry is not None:
        draft.move(row, entry, (), [(path, entry.node)])
    elif default is not None:
        draft.set(path, default, old=row.name, mark=draft.document.mark)
        now = f"{'.'.join(path)}: {inline(default)}"
        draft.changes.append(Change(key=row.name, was=f"(absent, {inline(default)})", now=now, why=row.why))


def _taken(draft: Draft, row: OldKey, default: str, choices: tuple[str, ...] = ()) -> str:
    """The value of a key that becomes a part of each component; it leaves the document."""
    entry = draft.entry((row.name,))
    if entry is None:
        return default
    draft.remove((row.name,))
    value = to_plain(entry.node)
    if not isinstance(value, str) or (choices and value not in choices):
        draft.wrong(entry, row.name, f"expected {' or '.join(choices) or 'text'}, got {inline(value)}")
        return default
    draft.note(row, entry, row.name, row.new)
    return value


def _sets(draft: Draft, earlier: str) -> None:
    kind = _taken(draft, KIND, CHAT, (CHAT, HUB))
    fields = {"messages_field": _taken(draft, MESSAGES, "messages")}
    # The template knows the roles `user` and `assistant`; other names are mapped to them.
    roles = {_taken(draft, INPUT, "user"): "user", _taken(draft, OUTPUT, "assistant"): "assistant"}
    supervised, urls = draft.entry(("supervised_data",)), draft.entry((URLS.name,))
    sets = [] if supervised is None or not isinstance(supervised.node, MapNode) else _named(supervised.node, supervised)
    if supervised is not None and not isinstance(supervised.node, MapNode) and to_plain(supervised.node) is not None:
        draft.wrong(
            supervised, "supervised_data", f"expected a source, or sources by name, got {inline(supervised.node)}"
        )
    draft.remove(("supervised_data",))
    sets = [dataset for dataset in sets if _is_known(draft, dataset)]
    if kind == CHAT and urls is not None:
        # Of the sets, only the place of the first one's tokens was used.
        cache = sets[0].node.entry("cache_dir") if sets and isinstance(sets[0].node, MapNode) else None
        cache_entries = () if cache is None else (cache,)
        urls_only = MapNode(
            entries=(Entry(key="train_urls", node=urls.node, mark=urls.mark), *cache_entries), mark=urls.mark
        )
        draft.remove((URLS.name,))
        sets, supervised = [Entry(key=ONE, node=urls_only, mark=urls.mark)], urls
    elif kind == HUB and earlier == SFT and len(sets) > 1 and supervised is not None:
        names = ", ".join(dataset.key for dataset in sets)
        draft.wrong(supervised, "supervised_data", f"sft trained on the first of {names} alone; leave out the others")
    if supervised is None:
        return
    for dataset in sets:
        component = _component(dataset, kind, {**fields, **({} if roles == _SAME else {"roles": roles})})
        draft.set(("data", "components", dataset.key), component, old="supervised_data", mark=dataset.mark)
    listed = ", ".join(dataset.key for dataset in sets)
    why = _PAIRS if kind == CHAT else "pairs are two keys of a record, each tokenized for itself"
    key = "supervised_data" if supervised is not urls else URLS.name
    now = f"data.components: {{{listed}}}"
    draft.changes.append(Change(key=key, was=f"{{{listed}}}", now=now, why=why, mark=supervised.mark))


_SAME = {"user": "user", "assistant": "assistant"}


def _named(node: MapNode, entry: Entry) -> list[Entry]:
    """Data sets by name; a single one gets the name `ONE`."""
    single = any(key in node for key in (*_OF_A_SET, *_OF_THE_HUB))
    return [Entry(key=ONE, node=node, mark=entry.mark)] if single else list(node)


def _is_known(draft: Draft, dataset: Entry) -> bool:
    """Whether an entry is a data set; records the problems of one that is not."""
    if not isinstance(dataset.node, MapNode):
        draft.wrong(dataset, f"supervised_data.{dataset.key}", f"expected a source, got {inline(dataset.node)}")
        return False
    for key in dataset.node:
        if key.key not in (*_OF_A_SET, *_OF_THE_HUB):
            known = ", ".join((*_OF_A_SET, *_OF_THE_HUB))
            draft.wrong(key, f"supervised_data.{dataset.key}.{key.key}", f"unknown key; the keys here are {known}")
    return True


def _component(dataset: Entry, kind: str, fields: Mapping[str, object]) -> MapNode:
    """A data set as a component."""
    assert isinstance(dataset.node, MapNode)
    keys = dataset.node
    source: dict[str, Node | object] = {"type": "hf"} if "id" in keys else {}
    for key in ("id", "name", "splits") if "id" in keys else ("train_urls", "validation_urls"):
        if (entry := keys.entry(key)) is not None:
            source[key] = to_plain(entry.node)
    format: dict[str, object]
    if kind == CHAT:
        format = {"type": "chat", **fields, "chat_template": PAIR}
    else:
        format = {"type": "supervised"}
        for old, (new, default) in _OF_THE_HUB.items():
            entry = keys.entry(old)
            format[new] = default if entry is None else to_plain(entry.node)
    component: dict[str, object] = {"source": source, "format": format, "pack": _PACKED}
    for key in ("cache_dir", "tags"):
        if (entry := keys.entry(key)) is not None:
            component[key] = to_plain(entry.node)
    node = from_plain(component, dataset.mark)
    assert isinstance(node, MapNode)
    return node
