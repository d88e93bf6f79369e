"""A slow disk, for a process that finds this file first: each flush, link and rename takes a while longer."""

import os
import time

SECONDS = float(os.environ.get("SOAK_SLOW_SECONDS", "0"))


def _slow(call):
    def slower(*args, **named):
        time.sleep(SECONDS)
        return call(*args, **named)

    return slower


if SECONDS:
    for _name in ("fsync", "replace", "rename", "link"):
        setattr(os, _name, _slow(getattr(os, _name)))
