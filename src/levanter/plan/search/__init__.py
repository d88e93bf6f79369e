"""Searches the mesh and mappings for a run on a pod: legal layouts ranked by arithmetic, the best few compiled.

`candidates` lists the layouts that the model's axis sizes allow, `estimate` costs one without a compiler, `search`
compiles the best and explains why the winner's neighbours lost. The result is a YAML fragment.
"""

from levanter.plan.search.candidates import Candidate as Candidate
from levanter.plan.search.candidates import candidates as candidates
from levanter.plan.search.estimate import Estimate as Estimate
from levanter.plan.search.estimate import NothingToSearch as NothingToSearch
from levanter.plan.search.estimate import SearchSubject as SearchSubject
from levanter.plan.search.estimate import estimate as estimate
from levanter.plan.search.estimate import estimate_layout as estimate_layout
from levanter.plan.search.estimate import search_subject as search_subject
from levanter.plan.search.render import render as render
from levanter.plan.search.render import search_to_json as search_to_json
from levanter.plan.search.search import Neighbour as Neighbour
from levanter.plan.search.search import SearchResult as SearchResult
from levanter.plan.search.search import Tried as Tried
from levanter.plan.search.search import search as search
