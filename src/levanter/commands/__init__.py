"""What each command does: its config, what it describes, what it executes. One folder per command."""
