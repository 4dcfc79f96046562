"""kvpool under LMDeploy, which is fetched from the package index, or skipped."""

from __future__ import annotations

from engines.upstream import PYTEST, fetched, run


def test_cases_of_kvpool() -> None:
    cases = __file__.replace("test_lmdeploy.py", "engines/lmdeploy_cases.py")
    ran = run(fetched("lmdeploy"), [*PYTEST, cases], {})
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
