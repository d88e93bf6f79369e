"""The CLI of an entry point: from the command line to the exit code, with devices, signals, peers and output."""
