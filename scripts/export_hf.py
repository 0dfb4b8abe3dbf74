"""Write a trained model as a Hugging Face folder that transformers and vLLM load.

    python scripts/export_hf.py RUN_DIR OUT
    python scripts/export_hf.py RUN_DIR/checkpoints/step_20 OUT --model critic --max-shard-size 2GB
    torchrun --nproc-per-node=2 scripts/export_hf.py RUN_DIR OUT --tensor-parallel 2

Any layout reads any checkpoint. Exits with 2 on bad input.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ppo.app.command import refuse
from megatron_ppo.app.export import MODELS, ExportLayout, bad_input, export, export_request, parse_size
from megatron_ppo.protocol.errors import ConfigError


def main() -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a run directory, or one checkpoint of it")
    parser.add_argument("output", type=Path, help="folder to write; must not exist, or be empty")
    parser.add_argument("--step", type=int, help="checkpoint of the run; default: the newest")
    parser.add_argument("--model", default="policy", help=f"one of: {', '.join(MODELS)}")
    parser.add_argument("--base", type=Path, help="folder of the initial model, if it has moved")
    parser.add_argument("--max-shard-size", default="5GB", help="of one weight file; default: %(default)s")
    for kind in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{kind}-parallel", type=int, default=1, help="ranks; default: 1")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("megatron_ppo").setLevel(logging.INFO)
    # Megatron's and torch's advice to developers; nothing that a user of this command could act on.
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        request = export_request(
            given.source,
            given.output,
            step=given.step,
            name=given.model,
            base=given.base,
            max_file_bytes=parse_size(given.max_shard_size),
        )
        layout = ExportLayout(
            tensor=given.tensor_parallel, pipeline=given.pipeline_parallel, expert=given.expert_parallel
        )
        with bad_input():
            export(request, layout)
    except ConfigError as error:
        return refuse(error)
    if os.environ.get("RANK", "0") == "0":
        print(given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
