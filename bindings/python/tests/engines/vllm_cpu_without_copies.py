"""The example `vllm_cpu.py` with a fault: the workers do not make the copies of compaction."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import vllm_cpu

vllm_cpu.__file__ = __file__  # what the example starts for each engine

if "--child" in sys.argv:
    from vllm.v1.worker import gpu_model_runner

    gpu_model_runner.copy_kv_cache_blocks_inplace = lambda *_: None

sys.exit(vllm_cpu.main())
