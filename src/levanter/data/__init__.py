"""Data: configuration, sources, readers, and the sequences that evaluation scores."""

from levanter.data.config import BlockShuffleConfig as BlockShuffleConfig
from levanter.data.config import CacheOptions as CacheOptions
from levanter.data.config import ConcatDatasetComponent as ConcatDatasetComponent
from levanter.data.config import DatasetComponent as DatasetComponent
from levanter.data.config import DatasetComponentBase as DatasetComponentBase
from levanter.data.config import DirectDatasetComponent as DirectDatasetComponent
from levanter.data.config import LmDataConfig as LmDataConfig
from levanter.data.errors import DataError as DataError
from levanter.data.errors import ManyDataErrors as ManyDataErrors
from levanter.data.evaluation import EvaluationData as EvaluationData
from levanter.data.evaluation import EvaluationSet as EvaluationSet
from levanter.data.evaluation import python_docs_text as python_docs_text
from levanter.data.evaluation import resolve_evaluation as resolve_evaluation
from levanter.data.formats import TextLmDatasetFormat as TextLmDatasetFormat
from levanter.data.passthrough import PassthroughTokenizer as PassthroughTokenizer
from levanter.data.sequences import EvalBatches as EvalBatches
from levanter.data.sequences import EvalRows as EvalRows
from levanter.data.sequences import EvalSequences as EvalSequences
from levanter.data.sequences import build_sequences as build_sequences
from levanter.data.sources import HfDatasetSource as HfDatasetSource
from levanter.data.sources import PythonDocsSource as PythonDocsSource
from levanter.data.sources import UrlDatasetSource as UrlDatasetSource
from levanter.data.tokenizer import Tokenizer as Tokenizer
