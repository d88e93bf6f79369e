"""`eval_lm`, `viz_logprobs`, `perplexity_gap`: how well models predict a text."""
