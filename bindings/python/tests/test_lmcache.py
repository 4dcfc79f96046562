"""kvpool under LMCache: LMCache's own tests of its address manager, and cases of kvpool's.

LMCache is fetched from the package index; without it, these tests are skipped.
"""

from __future__ import annotations

import pytest
from engines.fetch import Engine
from engines.upstream import PYTEST, fetched, run, verdicts

FILES = ["tests/v1/test_address_manager.py"]


@pytest.fixture(scope="module")
def lmcache() -> Engine:
    return fetched("lmcache")


def test_upstream_tests_pass(lmcache: Engine) -> None:
    stock = verdicts(lmcache, FILES, {})
    ours = verdicts(lmcache, FILES, {}, plugin="lmcache_plugin")
    assert set(stock.values()) == {"passed"}
    assert len(stock) == 71
    assert ours == stock


def test_cases_of_kvpool(lmcache: Engine) -> None:
    cases = __file__.replace("test_lmcache.py", "engines/lmcache_cases.py")
    ran = run(lmcache, [*PYTEST, cases], {})
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
