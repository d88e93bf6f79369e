"""What each command does: its config, what it describes, what it executes. A folder a command."""
