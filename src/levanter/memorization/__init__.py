"""Memorization: how likely a model is to continue a text word for word, measured window by window.

- `score_windows`: windows through a model: log-probability, rank and top-40 mass of every suffix token.
- `BookResult`: one book's scores and spans; `log_pz(scheme)` is log p_z under a decoding scheme.
- `required_n`: samples after which a suffix has appeared with probability p.
- `extraction_curve`: the share of windows that n samples extract with probability p, for every n.
- `coverage`: the share of a text inside at least one suffix that is likely enough.
"""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.memorization.coverage import coverage as coverage
    from levanter.memorization.discoverability import extraction_curve as extraction_curve
    from levanter.memorization.discoverability import required_n as required_n
    from levanter.memorization.results import BookResult as BookResult
    from levanter.memorization.results import Scheme as Scheme
    from levanter.memorization.results import Scores as Scores
    from levanter.memorization.runner import score_windows as score_windows

export_on_demand(__name__)
