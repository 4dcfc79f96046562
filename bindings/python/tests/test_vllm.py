"""kvpool under vLLM: vLLM's own tests with both block pools, and cases of kvpool's.

vLLM's source is fetched from the package index; without it, these tests are skipped.
"""

from __future__ import annotations

import pytest
from engines.fetch import VLLM_VERSIONS, Engine
from engines.upstream import PYTEST, fetched, run, verdicts

CORE = "tests/v1/core"
FILES = [
    f"{CORE}/test_prefix_caching.py",
    f"{CORE}/prefix_cache/test_partial_prefix_cache_hits.py",
    f"{CORE}/test_single_type_kv_cache_manager.py",
    f"{CORE}/test_kv_cache_metrics.py",
]

WRITES_ORDER = "writes the order of the free queue down; kvpool chooses places by runs"
WALKS_LINKS = "walks the links of vLLM's own queue (fake_free_list_head)"
FREES_UNOWNED = "frees blocks that it made itself and never allocated, which kvpool refuses as double frees"

# Tests of vLLM that pass with its own pool, and not with kvpool's, and why.
DIFFERENCES = {
    "test_prefix_caching::test_prefill[sha256]": WRITES_ORDER,
    "test_prefix_caching::test_prefill[sha256_cbor]": WRITES_ORDER,
    "test_prefix_caching::test_prefill_plp": WRITES_ORDER,
    "test_prefix_caching::test_cache_hit_local_and_external": WALKS_LINKS,
    "test_prefix_caching::test_cache_hit_local_and_external_three_groups": WALKS_LINKS,
    "test_prefix_caching::test_cache_hit_local_and_external_three_groups_preempt_and_reallocate": WALKS_LINKS,
    "test_prefix_caching::test_cache_hit_local_and_external_two_groups_preempt_and_reallocate": WALKS_LINKS,
    "test_single_type_kv_cache_manager::test_chunked_local_attention_remove_skipped_blocks": FREES_UNOWNED,
    "test_single_type_kv_cache_manager::test_rswa_remove_skipped_blocks_gap_range": FREES_UNOWNED,
    "test_single_type_kv_cache_manager::test_sliding_window_remove_skipped_blocks": FREES_UNOWNED,
}

OFFLOAD_FILES = ["tests/v1/kv_offload/cpu/test_manager.py", "tests/v1/kv_offload/cpu/policies"]
WRITES_IDS = "writes the ids of reused chunks down; kvpool gives them in ascending order"
OFFLOAD_DIFFERENCES = {
    "test_manager::test_already_stored_chunk_not_evicted_during_prepare_store[lru]": WRITES_IDS,
    "test_manager::test_already_stored_chunk_not_evicted_during_prepare_store[arc]": WRITES_IDS,
    "test_manager::test_cpu_manager": WRITES_IDS,
}


@pytest.fixture(scope="module", params=VLLM_VERSIONS)
def vllm(request: pytest.FixtureRequest) -> Engine:
    return fetched(request.param)


def test_upstream_tests_differ_only_where_named(vllm: Engine) -> None:
    stock = verdicts(vllm, FILES, {"KVPOOL_VLLM": "off"})
    ours = verdicts(vllm, FILES, {"KVPOOL_VLLM": "pool"}, plugin="vllm_plugin")
    passed = [name for name, verdict in stock.items() if verdict == "passed"]
    assert len(passed) > 300, "most of vLLM's tests run without a device"
    differences = {name for name in passed if ours.get(name) != "passed"}
    assert differences == set(DIFFERENCES)
    assert not [name for name in ours if ours[name] == "passed" and stock.get(name) != "passed"]


def test_upstream_tests_of_offloading_differ_only_where_named(vllm: Engine) -> None:
    stock = verdicts(vllm, OFFLOAD_FILES, {"KVPOOL_VLLM": "off"})
    ours = verdicts(vllm, OFFLOAD_FILES, {"KVPOOL_VLLM": "offload"}, plugin="vllm_plugin")
    assert len(stock) > 55
    assert set(stock.values()) == {"passed"}
    assert {name for name in stock if ours.get(name) != "passed"} == set(OFFLOAD_DIFFERENCES)


def test_cases_of_offloading(vllm: Engine) -> None:
    cases(vllm, "vllm_offload_cases.py", "off")


@pytest.mark.parametrize("part", ["pool", "queue"])
def test_cases_of_kvpool(vllm: Engine, part: str) -> None:
    cases(vllm, "vllm_cases.py", part)


@pytest.mark.parametrize("part", ["pool", "queue"])
def test_the_pool_is_served(vllm: Engine, part: str) -> None:
    cases(vllm, "vllm_serve_cases.py", part)


def cases(vllm: Engine, file: str, part: str) -> None:
    ran = run(vllm, [*PYTEST, __file__.replace("test_vllm.py", f"engines/{file}")], {"KVPOOL_VLLM": part})
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
