"""Data: configuration, sources, readers; the sequences that evaluation scores; token stores and training rows."""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.data.component_formats import FORMATS as FORMATS
    from levanter.data.component_formats import PAIRS as PAIRS
    from levanter.data.component_formats import has_chats as has_chats
    from levanter.data.config import BlockShuffleConfig as BlockShuffleConfig
    from levanter.data.config import CacheOptions as CacheOptions
    from levanter.data.config import ConcatDatasetComponent as ConcatDatasetComponent
    from levanter.data.config import DatasetComponent as DatasetComponent
    from levanter.data.config import DatasetComponentBase as DatasetComponentBase
    from levanter.data.config import DirectDatasetComponent as DirectDatasetComponent
    from levanter.data.config import LmDataConfig as LmDataConfig
    from levanter.data.documents import FileDocuments as FileDocuments
    from levanter.data.documents import python_docs_text as python_docs_text
    from levanter.data.errors import AbsentTextError as AbsentTextError
    from levanter.data.errors import DataError as DataError
    from levanter.data.errors import ManyDataErrors as ManyDataErrors
    from levanter.data.eval_rows import as_training_set as as_training_set
    from levanter.data.eval_rows import concatenate_sequences as concatenate_sequences
    from levanter.data.eval_rows import evaluation_rows as evaluation_rows
    from levanter.data.eval_rows import held_out_sequences as held_out_sequences
    from levanter.data.eval_sequences import EvalBatches as EvalBatches
    from levanter.data.eval_sequences import EvalRows as EvalRows
    from levanter.data.eval_sequences import EvalSequences as EvalSequences
    from levanter.data.eval_sequences import build_sequences as build_sequences
    from levanter.data.eval_sets import EvaluationData as EvaluationData
    from levanter.data.eval_sets import EvaluationSet as EvaluationSet
    from levanter.data.eval_sets import resolve_evaluation as resolve_evaluation
    from levanter.data.formats import ChatLmDatasetFormat as ChatLmDatasetFormat
    from levanter.data.formats import LmDatasetFormatBase as LmDatasetFormatBase
    from levanter.data.formats import PrebuiltLmDatasetFormat as PrebuiltLmDatasetFormat
    from levanter.data.formats import PreferenceChatLmDatasetFormat as PreferenceChatLmDatasetFormat
    from levanter.data.formats import SupervisedLmDatasetFormat as SupervisedLmDatasetFormat
    from levanter.data.formats import TextLmDatasetFormat as TextLmDatasetFormat
    from levanter.data.formats import format_name as format_name
    from levanter.data.loader import batches as batches
    from levanter.data.manifest import StoreError as StoreError
    from levanter.data.pairs import PairRows as PairRows
    from levanter.data.pairs import pair_targets as pair_targets
    from levanter.data.passthrough import PassthroughTokenizer as PassthroughTokenizer
    from levanter.data.readers import read_records as read_records
    from levanter.data.rows import NO_TARGET as NO_TARGET
    from levanter.data.rows import TrainRows as TrainRows
    from levanter.data.rows import next_tokens as next_tokens
    from levanter.data.sources import HfDatasetSource as HfDatasetSource
    from levanter.data.sources import PythonDocsSource as PythonDocsSource
    from levanter.data.sources import UrlDatasetSource as UrlDatasetSource
    from levanter.data.store_build import BuildProgress as BuildProgress
    from levanter.data.tokenizer import Tokenizer as Tokenizer
    from levanter.data.train_builder import build_tokens as build_tokens
    from levanter.data.train_builder import build_training as build_training
    from levanter.data.train_builder import compare_stores as compare_stores
    from levanter.data.train_builder import template_lines as template_lines
    from levanter.data.train_dataset import TrainingData as TrainingData
    from levanter.data.train_sets import TrainingSet as TrainingSet
    from levanter.data.train_sets import TrainingSets as TrainingSets
    from levanter.data.train_sets import resolve_training as resolve_training

export_on_demand(__name__)
