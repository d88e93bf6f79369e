"""`eval_lm` and `viz_logprobs`: how well a model predicts a text."""
