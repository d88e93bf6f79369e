"""One of several processes that score a book together; run by `tests/levanter/main/test_eval_careless_lm.py`.

python memorization_in_two_processes.py NUMBER COUNT PORT CONFIG
"""

import sys

import jax


def main() -> int:
    number, count, port, config = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, number, initialization_timeout=60)

    from levanter.main.entry import run_entry_point
    from levanter.main.eval_careless_lm import EvalCarelessLmConfig
    from levanter.main.eval_careless_lm import main as run

    return run_entry_point(EvalCarelessLmConfig, run, ["--config_path", config])


if __name__ == "__main__":
    sys.exit(main())
