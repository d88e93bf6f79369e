"""Preflight: whether a run loads and fits on a pod, and how fast it runs. Needs no TPU, no weights and no network.

    python -m levanter.main.plan eval_lm --config_path config/eval/demo.yaml --target v4-8
    python -m levanter.main.plan train_lm --config_path config/train/llama2_70b_v4-256.yaml --target v4-256,v5p-256

The command line is the entry point's own (files and `--key value`), with the options of `plan` in front of it or in
between.

What is listed as *not checked here* (a checkpoint, a tokenizer, a text that is absent or remote) does not prevent
planning; `--require_inputs` refuses it.
"""

import sys

from levanter.commands.planning import describe as describe
from levanter.commands.planning import main as main

if __name__ == "__main__":
    sys.exit(main())
