"""The example `vllm_cpu.py` with a fault in the states of LFM2 that vLLM's prefix cache keeps.

    python bindings/python/tests/engines/vllm_cpu_without_states.py FAULT --models convolution --modes uncached

| fault | meaning |
|---|---|
| `unwritten` | a chunk that ends inside a prompt does not write its state |
| `zeroed` | a state is zero when a request that hits the prefix cache reads it, as if its block had been reused |
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import vllm_cpu

vllm_cpu.__file__ = __file__  # what the example starts for each engine


def leave_unwritten() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d
    from vllm.v1.worker import mamba_utils

    prepare, convolve = mamba_utils.preprocess_mamba, causal_conv1d.causal_conv1d_fn_cpu
    inside: set[int] = set()  # blocks to which this step's chunks write

    def note_inside(output: Any, config: Any, cache: Any, places: Any, batch: Any, requests: Any, *rest: Any, **named: Any) -> None:
        prepare(output, config, cache, places, batch, requests, *rest, **named)
        inside.clear()
        groups = rest[2].mamba_group_ids
        for name in batch.req_ids:
            request = requests[name]
            if request.num_computed_tokens + output.num_scheduled_tokens[name] < request.num_prompt_tokens:
                inside.update(request.block_ids[group][places[name]] for group in groups)

    def restore(x: Any, weight: Any, bias: Any, states: Any, starts: Any, places: Any, *rest: Any, **named: Any) -> Any:
        before = {place: states[place].clone() for place in places.tolist() if place in inside}
        result = convolve(x, weight, bias, states, starts, places, *rest, **named)
        for place, state in before.items():
            states[place] = state
        return result

    mamba_utils.preprocess_mamba, causal_conv1d.causal_conv1d_fn_cpu = note_inside, restore


def zero_hits() -> None:
    from vllm.v1.worker import mamba_utils

    clean, copy = mamba_utils.cleanup_mamba_state_idx, mamba_utils.collect_mamba_copy_meta
    running: set[str] = set()

    def note_running(output: Any, places: dict[str, int]) -> None:
        clean(output, places)
        running.clear()
        running.update(places)

    def copy_zeros(buffers: Any, config: Any, functions: Any, groups: Any, source: int, *rest: Any) -> None:
        *_, request, layers = rest
        if request.req_id not in running:
            for group in groups:
                for layer in config.kv_cache_groups[group].layer_names:
                    for state in layers[layer].kv_cache:
                        state[request.block_ids[group][source]].zero_()
        copy(buffers, config, functions, groups, source, *rest)

    mamba_utils.cleanup_mamba_state_idx, mamba_utils.collect_mamba_copy_meta = note_running, copy_zeros


if "--child" in sys.argv:
    {"unwritten": leave_unwritten, "zeroed": zero_hits}[os.environ["KVPOOL_PLANTED"]]()
else:
    os.environ["KVPOOL_PLANTED"] = sys.argv.pop(1)

sys.exit(vllm_cpu.main())
