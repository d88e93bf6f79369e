"""The language-model head: scores, losses and log-probabilities in chunks of the vocabulary."""
