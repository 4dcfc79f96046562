"""The classes of errors."""

import pickle

import kvpool
import pytest
from kvpool import errors


def test_every_error_is_a_kvpool_error() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), kvpool.KvPoolError)
        assert getattr(kvpool, name) is getattr(errors, name)


def test_errors_are_also_the_builtin_errors_that_they_refine() -> None:
    assert issubclass(kvpool.OutOfBlocks, MemoryError)
    assert issubclass(kvpool.OverQuota, kvpool.OutOfBlocks)
    assert issubclass(kvpool.Timeout, TimeoutError)
    assert issubclass(kvpool.InvalidArgument, ValueError)


def test_fields_survive_pickling() -> None:
    error = kvpool.Timeout("too late", kind="Deadline", asked=7)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.kind, again.asked) == ("too late", "Deadline", 7)
    with pytest.raises(AttributeError, match="no field 'total'"):
        _ = again.total
