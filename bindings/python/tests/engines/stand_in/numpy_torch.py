"""Tensors of torch, as far as pools in host memory need them, by numpy.

`sitecustomize` puts them into its module for torch if ``KVPOOL_TORCH=numpy`` is set.
"""

import types

import numpy as np

NAMES = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "int": "int32",
    "long": "int64",
    "bfloat16": "uint16",
}

KINDS = (
    "bool",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)
kinds = {}
"""The dtypes of torch, by the names of numpy's."""


def numpy_of(kind):
    """The dtype of numpy for one of torch's."""
    name = getattr(kind, "name", None)
    return np.dtype(NAMES.get(name, name)) if name else np.dtype(kind or "float32")


class Tensor(np.ndarray):
    """An array with the names of a tensor's methods."""

    @property
    def dtype(self):
        return kinds[np.asarray(self).dtype.name]

    def cpu(self):
        return self

    def to(self, *args, dtype=None, **kwargs):
        return self if dtype is None else wrap(self.astype(numpy_of(dtype)))

    def numel(self):
        return self.size

    def element_size(self):
        return self.itemsize

    def contiguous(self):
        return wrap(np.ascontiguousarray(self))

    def is_contiguous(self):
        return self.flags.c_contiguous

    def data_ptr(self):
        return self.ctypes.data

    def clone(self):
        return wrap(np.array(self))

    def stride(self, at=None):
        steps = tuple(step // self.itemsize for step in self.strides)
        return steps if at is None else steps[at]

    def transpose(self, one, other):
        return self.swapaxes(one, other)

    def dim(self):
        return self.ndim

    def numpy(self):
        return np.asarray(self)

    def split(self, size):
        return [self[at : at + size] for at in range(0, len(self), size)]

    def flatten(self):
        # As torch's: a view where there can be one.
        return self.reshape(-1)

    def view(self, *shape, dtype=None):
        if len(shape) == 1 and shape[0] is np.ndarray:
            return super().view(np.ndarray)
        if len(shape) == 1 and not isinstance(shape[0], (int, tuple)):
            dtype = shape[0]
        return wrap(np.asarray(self).view(numpy_of(dtype))) if dtype is not None else self.reshape(*shape)


def wrap(array):
    return np.asarray(array).view(Tensor)


def dims_of(dims):
    return dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims


def fill(torch):
    kinds.update((name, getattr(torch, name)) for name in KINDS)
    torch.missing = ("hpu", "mlu", "musa", "npu", "xpu")
    torch.Tensor, Tensor.device = Tensor, torch.device("cpu")
    torch.finfo = lambda kind: types.SimpleNamespace(max=3.0e38, min=-3.0e38, bits=8 * kind.itemsize)

    def zeros(*dims, dtype=None, **_):
        return wrap(np.zeros(dims_of(dims), numpy_of(dtype)))

    torch.zeros = torch.empty = zeros
    torch.ones = lambda *dims, dtype=None, **_: wrap(np.ones(dims_of(dims), numpy_of(dtype)))
    torch.arange = lambda *bounds, dtype=None, **_: wrap(np.arange(*bounds, dtype=dtype and numpy_of(dtype)))
    torch.tensor = lambda data, dtype=None, **_: wrap(np.array(data, dtype=dtype and numpy_of(dtype)))
    torch.from_numpy = wrap
    torch.frombuffer = lambda buffer, dtype, count=-1, offset=0: wrap(
        np.frombuffer(buffer, numpy_of(dtype), count, offset)
    )
    torch.cat = lambda tensors, dim=0: wrap(np.concatenate(tensors, axis=dim))
    torch.equal = lambda one, other: bool(np.array_equal(one, other))
