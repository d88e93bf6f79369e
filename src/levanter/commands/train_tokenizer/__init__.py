"""`train_tokenizer`: a byte-level BPE tokenizer from text, with a report of its compression."""
