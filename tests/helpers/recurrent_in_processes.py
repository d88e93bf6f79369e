"""One of several processes that generate with layers of different decode states.

    python recurrent_in_processes.py FOLDER

Run by `tests/multihost/test_decode_state.py`. The model of `helpers.recurrent` lies over 8 devices of all processes;
process 0 writes its texts, and what the schedule did, to `FOLDER/texts.json`.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    from levanter.commands.cli.lifecycle import end_together, join_processes
    from levanter.distributed.initialize import DistributedConfig

    join_processes(DistributedConfig())

    from helpers.recurrent import greedy_requests, recurrent_over_eight
    from helpers.tiny_engine import observed

    from haliax_ext.meshspec import MeshSpec
    from levanter.commands.model.text_generator import process_engine
    from levanter.inference.engine import make_schedule

    built = recurrent_over_eight(MeshSpec.of(data=4, model=2))
    schedule = make_schedule(built.programs, share_prefixes=True)
    with process_engine(built.runner, schedule) as process:
        if process.engine is not None:
            seen = observed(process.engine, greedy_requests(2, 20))
            texts = [[one.request, one.choice, text] for one, text in seen.texts.items()]
            report = {
                "texts": sorted(texts),
                "hits": seen.hits,
                "comebacks": seen.comebacks,
                "failed": len(seen.failed),
            }
            (Path(sys.argv[1]) / "texts.json").write_text(json.dumps(report))
    end_together(0)


if __name__ == "__main__":
    main()
