"""Exit codes, limits on input and bounded JSON for all other packages. It imports the standard library only."""
