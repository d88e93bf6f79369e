"""levanter: named-axis training and evaluation of language models in JAX. Importing it does nothing."""
