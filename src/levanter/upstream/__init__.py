"""Upstream's names: old modules and their replacements, facades, what is absent. `levanter/__init__` installs it."""
