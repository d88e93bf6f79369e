"""Runs a module or a script as the main program, which the kernel kills when the process that started it dies (Linux).

python end_with_parent.py MODULE|SCRIPT ARGUMENT…
"""

import ctypes
import os
import runpy
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    if os.getppid() != int(os.environ["STARTED_BY"]):
        sys.exit("the process that started this one is gone already")
    program = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path.pop(0)
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
