"""Makes the compiled texts that the parser's tests read: `python tests/aot/make_golden_hlo.py`.

Each is `described_programs.small` compiled by a real compiler, with the parts that nothing reads cut out (source
locations, window configurations, layouts of the entry). Run it again when the pinned compiler changes, and read the
difference.
"""

import importlib.metadata
import json
import re
import sys
import tempfile
from pathlib import Path

from levanter.plan.aot import compile_programs

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden" / "hlo"
CASES = {
    "small_v4.txt": ("v4-16", {"data": 4, "model": 2}),
    "small_v6e_two_slices.txt": ("2xv6e-4", {"slices": 2, "data": 2, "model": 2}),
    "small_cpu.txt": ("local", {"data": 4, "model": 2}),
}


def trimmed(text: str) -> str:
    """The text without what no figure is read from."""
    tables = "FileNames|FunctionNames|FileLocations|StackFrames"
    text = re.sub(rf"^({tables})\n(\d+ .*\n)*", "", text, flags=re.M)
    text = re.sub(r"\n\n+", "\n\n", text)
    text = re.sub(
        r"^(HloModule [^,]+), .*?(is_scheduled=true).*?(, num_partitions=\d+).*$", r"\1, \2\3", text, flags=re.M
    )
    text = re.sub(r" stack_frame_id=\d+", "", text)

    def config(found: re.Match[str]) -> str:
        kept = re.findall(r'"estimated_cycles":"\d+"|"known_trip_count":\{"n":"\d+"\}', found.group(0))
        return f", backend_config={{{','.join(kept)}}}" if kept else ""

    return re.sub(r", backend_config=\{.*\}(?=\n)", config, text)


def main() -> int:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, (target, mesh) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            compile_programs(
                f"{HERE / 'described_programs.py'}:small",
                {"mesh": mesh},
                target=target,
                keep_text=Path(folder),
            )
            (GOLDEN / name).write_text(trimmed((Path(folder) / "small.hlo.txt").read_text()))
    maker = {package: importlib.metadata.version(package) for package in ("libtpu", "jax")}
    (GOLDEN / "made_with.json").write_text(json.dumps(maker) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
