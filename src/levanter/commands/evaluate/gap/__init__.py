"""`perplexity_gap`: two models compared byte by byte."""
