"""Asynchronous PPO.

    torchrun --nproc-per-node=1 scripts/train_async_ppo.py +experiment=megatron_40step [key=value ...]
    torchrun --nproc-per-node=2 scripts/train_async_ppo.py -m +experiment=cpu_smoke run.seed=1,2

Exit code (torchrun turns every other than 0 into 1): 0 finished with all gates passed, 1 failed run or gate, 2 bad
input, found before anything was started.
"""

import sys

from megatron_ppo.app.command import main

# Megatron's checkpoint writers start processes that import this file again.
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
