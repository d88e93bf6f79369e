"""A process from its command line to its exit code: devices, interrupts, peers, output."""
