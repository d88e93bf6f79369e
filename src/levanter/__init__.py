"""levanter: named-axis training and evaluation of language models in JAX. Importing it imports nothing of it.

Scripts of earlier generations find the names that they use all the same: the one line below sees to that.
"""

from levanter.upstream.install import install as _install

_install()
