"""What every other package may use: exit codes, limits on input, bounded JSON. It imports the standard library only."""
