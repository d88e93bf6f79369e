"""Entry points: parse, describe, check, execute, print. The only place that wires sibling rooms together."""
