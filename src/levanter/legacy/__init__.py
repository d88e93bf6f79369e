"""Upstream's names: old modules and what became of them, facades, what is absent. `levanter/__init__` installs it."""
