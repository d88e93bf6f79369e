"""Retrieval from long contexts: values hidden in generated texts, and whether a model returns them (RULER's tasks)."""
