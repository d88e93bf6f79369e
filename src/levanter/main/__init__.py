"""The commands: `python -m levanter.main.X` runs the entry point X. The only package that imports several commands."""
