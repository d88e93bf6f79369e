"""Demo of text generation: a small model answers three questions, greedy and sampled, then quantized to int8."""

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.cli.lifecycle import exit_process
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.demo import main

if __name__ == "__main__":
    exit_process(run_entry_point(GenerateConfig, main))
