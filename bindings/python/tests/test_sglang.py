"""kvpool under SGLang, which is fetched from the package index, or skipped."""

from __future__ import annotations

from engines.upstream import PYTEST, fetched, run


def test_cases_of_kvpool() -> None:
    cases = __file__.replace("test_sglang.py", "engines/sglang_cases.py")
    ran = run(fetched("sglang"), [*PYTEST, cases], {})
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
