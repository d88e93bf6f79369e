"""Two models on the same bytes: where their log-probabilities differ."""
