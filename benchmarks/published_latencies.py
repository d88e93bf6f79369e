"""Whether a time that chips lack brings a missed load of `published_decode.py` near. No TPU, no compiler: seconds.

    python benchmarks/published_latencies.py [--case llama3.1_8b_v6e-4_16]

A step has more in it than what the compiler prints cycles for: sums over chips wait for each other, kernels are
started, somebody samples. Here such times are *tried*, together with the scale of the compiler's cycles, on the sums
that are kept of every load (`tests/golden/published_decode.json`): each scale with each time a layer and each time a
step. Printed is how near the load can come while every other load of the same generation of chips stays near, and what
becomes of all of them where only the loads that calibrate are fitted. Nothing that is found here is a constant of a
plan: fitted to the loads that test, it would test nothing.
"""

import argparse
import sys

import numpy as np
from published_decode import NEAR, generation, read
from published_loads import CASES, LATER

SCALES = np.arange(30, 130) / 100
OF_LAYER = np.arange(0, 80, 2) * 1e-6
"""Seconds."""
OF_STEP = np.arange(40) * 1e-4
"""Seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="llama3.1_8b_v6e-4_16", help="the load that is to come near")
    name, kept = parser.parse_args().case, read()
    (chosen,) = (case for case in (*CASES, *LATER) if case.name == name)
    cases = [case for case in (*CASES, *LATER) if case.name in kept and generation(case) == generation(chosen)]
    off = {}
    for case in cases:
        figures = kept[case.name]
        assert figures.decode is not None and figures.prompt is not None and case.seconds is not None
        decode = np.array([figures.decode.seconds(scale) for scale in SCALES])[:, None, None]
        prompt = np.array([figures.prompt.seconds(scale) for scale in SCALES])[:, None, None]
        added = case.model["num_layers"] * OF_LAYER[:, None] + OF_STEP
        off[case.name] = (decode + added + case.in_flight / case.output * prompt) / case.seconds - 1
    others = np.max([np.abs(each) for case, each in off.items() if case != name], axis=0)
    stay = others <= NEAR
    print(f"{stay.sum():,} of {stay.size:,} leave the other {len(off) - 1} loads within {NEAR:.0%}")
    if stay.any():
        at = np.unravel_index(np.argmin(np.where(stay, np.abs(off[name]), np.inf)), stay.shape)
        print(f"{name} comes to {100 * off[name][at]:+.1f} % at most, with {_said(at)}:")
        print("; ".join(f"{case} {100 * each[at]:+.1f}" for case, each in off.items() if case != name))
    calibrate = [case.name for case in cases if case.half == "c"]
    print(f"\nscale fitted to {', '.join(calibrate)}:\n")
    print("| a layer | a step | scale | off | others not within 25 % |\n|---|---|---|---|---|")
    errors = sum(off[case] ** 2 for case in calibrate)
    for layer in range(0, len(OF_LAYER) // 2 + 1, 5):
        for step in range(0, len(OF_STEP), 10):
            at = int(np.argmin(errors[:, layer, step])), layer, step
            lost = [f"{case} {100 * off[case][at]:+.0f}" for case in off if case != name and abs(off[case][at]) > NEAR]
            micro, milli = f"{1e6 * OF_LAYER[layer]:.0f} µs", f"{1e3 * OF_STEP[step]:.0f} ms"
            front = f"| {micro} | {milli} | {SCALES[at[0]]:.2f} | {100 * off[name][at]:+.0f} % "
            print(f"{front}| {', '.join(lost) or 'none'} |")
    return 0


def _said(at: tuple[np.intp, ...]) -> str:
    scale, layer, step = at
    return f"cycles × {SCALES[scale]:.2f}, {1e6 * OF_LAYER[layer]:.0f} µs a layer, {1e3 * OF_STEP[step]:.1f} ms a step"


if __name__ == "__main__":
    sys.exit(main())
