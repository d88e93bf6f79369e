"""Upstream's names: old modules and what became of them, facades, what is absent. Nothing imports this room."""
