#!/usr/bin/env python3
"""Compares the PTX in `ptx/` with the output of NVRTC 12.0.140 for these kernels, or writes it (`--write`).

    pip install nvidia-cuda-nvrtc-cu12==12.0.140        (23 MB; no GPU and no driver are needed)
    python3 kernels/ptx.py [--write]

The PTX ISA of this version (8.0) loads on every driver of CUDA 12 and later; newer versions write PTX
that older drivers refuse. The script also generates the machine code for sm_80 and sm_90, since NVRTC
checks inline assembly only when it assembles; a kernel that spills registers, or has a stack frame,
fails. Prints the table of registers as markdown.
"""

import ctypes
import pathlib
import re
import site
import sys

HERE = pathlib.Path(__file__).resolve().parent
CAPABILITIES = (80, 90)
# The probes do not differ between architectures.
SOURCES = {"kvpool": CAPABILITIES, "probes": CAPABILITIES[:1]}
VERSION = (12, 0)
# No contraction of a product and a sum: codes must equal those of the host, bit for bit.
OPTIONS = ("--std=c++17", "--fmad=false", "--restrict")
ENTRY = re.compile(
    r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.S,
)


def load_nvrtc():
    folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    for folder in folders:
        for path in pathlib.Path(folder).glob("nvidia/cuda_nvrtc/lib/libnvrtc.so.12"):
            library = ctypes.CDLL(str(path))
            major, minor = ctypes.c_int(), ctypes.c_int()
            library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
            if (major.value, minor.value) == VERSION:
                return library
            sys.exit(f"ptx.py: NVRTC {major.value}.{minor.value} at {path}, but 12.0 (12.0.140) is needed")
    sys.exit("ptx.py: no NVRTC: pip install nvidia-cuda-nvrtc-cu12==12.0.140")


def text(library, program, size_of, get):
    size = ctypes.c_size_t()
    getattr(library, size_of)(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, get)(program, buffer)
    return buffer.value.decode(errors="replace")


def compile_source(library, name, *options):
    """PTX (empty when machine code is asked for) and the compiler's log."""
    headers = sorted(HERE.glob("*.h"))
    count = len(headers)
    contents = (ctypes.c_char_p * count)(*(header.read_bytes() for header in headers))
    names = (ctypes.c_char_p * count)(*(header.name.encode() for header in headers))
    source = (HERE / f"{name}.cu").read_bytes()
    program = ctypes.c_void_p()
    code = library.nvrtcCreateProgram(
        ctypes.byref(program), source, f"{name}.cu".encode(), count, contents, names
    )
    if code != 0:
        sys.exit(f"ptx.py: {name}.cu: nvrtcCreateProgram says {code}")
    arguments = [option.encode() for option in (*OPTIONS, *options)]
    code = library.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
    log = text(library, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
    if code != 0:
        sys.exit(f"ptx.py: {name}.cu: {' '.join(options)}\n{log}")
    ptx = text(library, program, "nvrtcGetPTXSize", "nvrtcGetPTX")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx, log


def main(arguments):
    if any(argument != "--write" for argument in arguments):
        sys.exit(__doc__)
    library = load_nvrtc()
    failures, registers = [], {}
    for name, capabilities in SOURCES.items():
        kernels = set(re.findall(r"KVP_KERNEL(?:_OF)?\((?:\w+, )?(kvp_\w+),", (HERE / f"{name}.cu").read_text()))
        for capability in capabilities:
            ptx, warnings = compile_source(library, name, f"--gpu-architecture=compute_{capability}")
            if warnings.strip():
                failures.append(f"{name}.cu: {warnings}")
            path = HERE / "ptx" / f"{name}.sm{capability}.ptx"
            if arguments:
                path.write_text(ptx)
            elif not path.exists() or path.read_text() != ptx:
                failures.append(f"{path.name} is not what {name}.cu gives: run ptx.py --write")
            _, log = compile_source(
                library, name, f"--gpu-architecture=sm_{capability}", "--ptxas-options=-v"
            )
            entries = ENTRY.findall(log)
            entry_points = re.findall(r"\.entry (\w+)", ptx)
            if len(entries) != len(entry_points) or len(entries) != len(kernels):
                failures.append(f"{name}.cu: {len(entries)} kernels in the log, {len(entry_points)} in the PTX")
            for kernel, stack, stores, loads, used in entries:
                registers.setdefault(kernel, {})[capability] = int(used)
                if int(stack) + int(stores) + int(loads) > 0:
                    failures.append(f"{kernel} on sm_{capability}: stack {stack}, spills {stores} / {loads} bytes")
    print("| kernel | " + " | ".join(f"registers, sm_{capability}" for capability in CAPABILITIES) + " |")
    print("|---" * (len(CAPABILITIES) + 1) + "|")
    for kernel in sorted(registers):
        counts = (str(registers[kernel].get(capability, "-")) for capability in CAPABILITIES)
        print(f"| `{kernel}` | " + " | ".join(counts) + " |")
    for failure in failures:
        print(f"ptx.py: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
