"""A data set of the Hub, read from the Parquet files that the Hub keeps of it; a file system in memory stands in."""

from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from helpers.small_tokenizer import EOS, SmallTokenizer

from levanter.data import AbsentTextError, DatasetComponent, LmDataConfig, build_training, resolve_evaluation
from levanter.data.formats import TextLmDatasetFormat
from levanter.data.sources import HfDatasetSource

pytestmark = pytest.mark.quick

FOLDER = "/datasets/org/stories@refs/convert/parquet/plain"


class Hub(MemoryFileSystem):
    """What answers to hf:// here."""

    protocol = "hf"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("hf://"))

    def unstrip_protocol(self, name):
        return f"hf://{self._strip_protocol(name).lstrip('/')}"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setitem(_registry, "hf", Hub)
    Hub.store.clear()
    return Hub()


def write(hub: Hub, path: str, texts: list[str]) -> None:
    with hub.open(f"{FOLDER}/{path}", "wb") as file:
        pq.write_table(pa.table({"body": texts, "id": list(range(len(texts)))}), file)


def config_of(**source) -> LmDataConfig:
    component = DatasetComponent(
        source=HfDatasetSource(id="org/stories", name="plain", **source), format=TextLmDatasetFormat(text_key="body")
    )
    return LmDataConfig(cache_dir=None, components={"stories": component}, shuffle=False)


def test_its_splits_are_files_of_the_hub(hub):
    train = [f"a story of {n}" for n in range(30)]
    write(hub, "train/0000.parquet", train[:20])
    write(hub, "train/0001.parquet", train[20:])
    write(hub, "validation/0000.parquet", ["how it ends"])
    tokenizer = SmallTokenizer()
    data = build_training(config_of(), tokenizer, positions=8, batch_sizes=[(0, 1)], seed=0)
    found = []
    for step in range(len(data.sets[0].rows)):
        row = data.rows(step).tokens[0]
        found.append(tokenizer.decode(row[row > EOS]))
    assert "".join(found) and "".join(train).startswith("".join(found))
    (only,) = resolve_evaluation(config_of()).sets
    assert [document.text for document in only.documents()] == ["how it ends"]
    # Only some of its splits.
    assert not resolve_evaluation(config_of(splits=["train"]), in_training=True).sets


def test_one_that_is_not_there_is_told_by_its_key(hub):
    with pytest.raises(AbsentTextError, match=r"data\.components\.stories\.source: hf://datasets/org/stories@refs"):
        resolve_evaluation(config_of())
