"""Evaluation: from log-probabilities to the metrics that people compare."""

from levanter.eval.perplexity import Average as Average
from levanter.eval.perplexity import EvalResult as EvalResult
from levanter.eval.perplexity import RowScores as RowScores
from levanter.eval.perplexity import Score as Score
from levanter.eval.perplexity import SetScore as SetScore
from levanter.eval.perplexity import summarize as summarize
from levanter.eval.report import format_result as format_result
from levanter.eval.report import result_json as result_json
from levanter.eval.report import result_table as result_table
from levanter.eval.report import write_result as write_result
