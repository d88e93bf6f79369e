"""A soak: runs in turns under everything that happens to runs."""
