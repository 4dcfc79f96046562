"""The rotary embedding of vLLM on the CPU, of heads in rows and in three dimensions. vLLM alone.

    python vllm_cpu_rotation.py [mended]

Prints the largest difference of each from the formula, and exits with 1 if there is one.
"""

import sys
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

TOKENS, HEADS, KV_HEADS, SIZE, THETA = 8, 4, 2, 32, 10_000.0

if "mended" in sys.argv:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import vllm_cpu

    vllm_cpu.mend_rotation()

with set_current_vllm_config(VllmConfig()):
    rope = get_rope(SIZE, 2048, rope_parameters={"rope_type": "default", "rope_theta": THETA}, dtype=torch.float32)
torch.manual_seed(7)
positions = torch.arange(100, 100 + TOKENS)
query, key = torch.randn(TOKENS, HEADS, SIZE), torch.randn(TOKENS, KV_HEADS, SIZE)
angles = positions[:, None, None] / THETA ** (torch.arange(0, SIZE, 2) / SIZE)


def expected(heads: torch.Tensor) -> torch.Tensor:
    low, high = heads.chunk(2, -1)
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)


worst = {}
for name, shape in (("rows", (TOKENS, -1)), ("three dimensions", (TOKENS, -1, SIZE))):
    # Copies: the kernel works in place.
    turned = rope.forward_cpu(positions, query.clone().view(shape), key.clone().view(shape))
    pairs = zip(turned, (query, key))
    worst[name] = max((got.reshape(heads.shape) - expected(heads)).abs().max().item() for got, heads in pairs)
    print(f"{name}: {worst[name]:.6f}")
sys.exit(max(worst.values()) > 1e-4)
