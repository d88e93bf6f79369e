"""The commands, one folder each: configuration, description (the plan), and execution."""
