#!/usr/bin/env bash
# Plans three runs for this machine's GPU, runs their Programs, and prints planned and measured memory and times.
#
#   pip install -e '.[gpu,plan-gpu]'      (the compiler and the libraries of the installed JAX)
#   benchmarks/gpu.sh                     one H100 or H200: about 8 minutes
#   benchmarks/gpu.sh --tiny              any devices, CPUs too: whether every part works
#
# The result is printed as a Markdown table, and written as JSON to the file that --output names.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit --format=csv
# Every number that is set here is read by the plan and by the runs.
export XLA_CLIENT_MEM_FRACTION="${XLA_CLIENT_MEM_FRACTION:-0.92}"
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" benchmarks/gpu_runs.py "$@"
