"""Stand-ins for packages that the scheduler side of an engine imports and does not use.

On `PYTHONPATH`, this file lets the block managers of engines, and their tests, run without torch
and without compiled kernels. Modules that are not installed and are named below are answered by
modules whose attributes are classes: they can be subclassed, called, subscripted and or-ed.
Nothing computes: a test that needs a tensor's values fails.
"""

import abc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types

# Packages to stand in for if they are not installed.
ABSENT = set(os.environ.get("KVPOOL_STAND_INS", "").split()) | {
    "aiohttp", "anthropic", "compressed_tensors", "cuda", "cupy", "depyf", "diskcache", "einops",
    "fastapi", "filelock", "flashinfer", "gguf", "huggingface_hub", "ijson", "interegular", "jsonschema",
    "lark", "lm_format_enforcer", "llguidance", "mcp", "mistral_common", "model_hosting_container_standards",
    "numba", "nvtx", "openai", "openai_harmony", "opencv", "cv2", "opentelemetry", "outlines", "outlines_core",
    "partial_json_parser", "prometheus_fastapi_instrumentator", "ray", "safetensors", "scipy", "sentencepiece",
    "setproctitle", "six", "starlette", "tiktoken", "tokenizers", "torch", "torchaudio", "torchvision", "tqdm",
    "transformers", "triton", "uvicorn", "uvloop", "watchfiles", "xgrammar", "py_cpuinfo", "cpuinfo", "pynvml",
    "amdsmi", "soundfile", "librosa", "av", "datasets", "tblib", "pytest_asyncio", "xformers", "httpx",
    "python_json_logger", "pythonjsonlogger", "dill", "blake3", "pybase64", "quack", "cutlass",
    "zstandard", "lz4", "flash_attn", "mmengine", "dlblas", "dlslime", "deep_gemm", "deep_ep", "shortuuid", "addict", "peft", "accelerate", "fire", "aiofiles", "nixl", "redis", "sortedcontainers_stub",
}
# Modules of the engine itself that need a device.
INNER = (
    "vllm.ir", "vllm._custom_ops", "vllm.v1.worker", "vllm.model_executor.layers.attention",
    "lmcache.lmcache_native", "sglang.kernels", "sglang.lang", "sglang.srt.configs", "sglang.srt.distributed",
    "sglang.srt.layers", "sglang.srt.utils.hf_transformers_patches", "vllm.vllm_flash_attn", "vllm._C", "vllm._rs", "vllm.third_party",
)


class Meta(abc.ABCMeta):
    """Of the classes that stand for anything."""

    def __getattr__(cls, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name.startswith("_abc") or name in ("_is_protocol", "_fields"):
            raise AttributeError(name)
        made = anything(name)
        setattr(cls, name, made)
        return made

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls

    def __call__(cls, *args, **kwargs):
        # A decorator returns what it is given.
        if cls.__dict__.get("_stands_in") and len(args) == 1 and not kwargs:
            if isinstance(args[0], (types.FunctionType, type)):
                return args[0]
        return super().__call__(*args, **kwargs)

    def __bool__(cls):
        return not cls.__dict__.get("_stands_in", False)

    def __iter__(cls):
        return iter(())

    def __lt__(cls, other):
        return True

    def __le__(cls, other):
        return True

    def __gt__(cls, other):
        return False

    def __ge__(cls, other):
        return False


class Anything(metaclass=Meta):
    _stands_in = True

    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and isinstance(args[0], (types.FunctionType, type)):
            return args[0]
        return Anything()

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    def __getitem__(self, item):
        return Anything()

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __bool__(self):
        return False

    def __or__(self, other):
        return self

    def __ror__(self, other):
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


def anything(name):
    return Meta(name, (Anything,), {"_stands_in": True, "__module__": "stand_in"})


class Module(types.ModuleType):
    missing = ()
    """Names that this module does not have: engines ask for devices so."""

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__") or name in self.missing:
            raise AttributeError(name)
        made = anything(name)
        setattr(self, name, made)
        return made


class dtype:
    def __init__(self, name, itemsize, is_floating_point=False):
        self.name, self.itemsize, self.is_floating_point = name, itemsize, is_floating_point
        self.is_complex = False

    def __repr__(self):
        return f"torch.{self.name}"

    def __reduce__(self):
        return self.name

    def __or__(self, other):
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class iinfo:
    def __init__(self, kind):
        self.bits = 8 * kind.itemsize
        self.min, self.max = -(1 << self.bits - 1), (1 << self.bits - 1) - 1


class device:
    def __init__(self, kind="cpu", index=None):
        self.type, _, number = str(kind).partition(":")
        self.index = int(number) if number else index

    def __repr__(self):
        return f"device({self.type!r})"

    def __eq__(self, other):
        return isinstance(other, device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self):
        return hash((self.type, self.index))


def fill_torch(torch):
    torch.__version__ = "2.15.0"
    torch.dtype, torch.device = dtype, device
    sizes = {
        "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "float": 4, "half": 2, "double": 8,
        "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "int": 4,
        "long": 8, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8, "short": 2, "float4_e2m1fn_x2": 1,
        "complex64": 8,
    }
    for name, size in sizes.items():
        setattr(torch, name, dtype(name, size, "float" in name or name in ("half", "double")))
    torch.Size, torch.iinfo = tuple, iinfo
    torch.version = types.SimpleNamespace(cuda=None, hip=None, xpu=None)
    torch.Tensor = anything("Tensor")

    def no_grad(function=None):
        return function if callable(function) else Anything()

    torch.no_grad = torch.inference_mode = no_grad
    torch.get_default_dtype = lambda: torch.float32
    torch.manual_seed = lambda seed: None
    torch.set_num_threads = lambda number: None
    torch.get_num_threads = lambda: 1


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        root = name.partition(".")[0]
        inner = any(name == prefix or name.startswith(prefix + ".") for prefix in INNER)
        if inner or root in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        if module.__name__ == "torch":
            fill_torch(module)
            if os.environ.get("KVPOOL_TORCH") == "numpy":
                import numpy_torch

                numpy_torch.fill(module)
        if module.__name__ == "torch.library":
            module.infer_schema = lambda *args, **kwargs: ""


def is_installed(name):
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


ABSENT = {name for name in ABSENT if not is_installed(name)}
sys.meta_path.insert(0, Finder())

installed_version = importlib.metadata.version


def version(name):
    """Engines ask for the version of transformers while they are imported."""
    return "5.9.0" if name == "transformers" and name in ABSENT else installed_version(name)


importlib.metadata.version = version
