"""Kernels that run without loading numba: compiled once by numba, kept as code that runs where it lies (`flat_code`), or loaded by llvmlite.

Loading numba takes 0.2 s of processor time and more, each kernel from its cache 20 to 100 ms. A command that reads a trace for 0.1 s needs neither:
a kept kernel is read and copied in 0.2 ms; where it must be linked, loading llvmlite takes 0.04 s, a kernel 1 ms. Such kernels take flat arrays and
integers, allocate nothing and raise nothing.

What is kept is named by a mark of the sources, the signature, this processor and the versions, and carries a checksum; a damaged file is made again.
Where nothing can be written, or what was compiled refers to functions of numba, numba runs the kernel.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from . import flat_code
from .flat_code import flat, loaded
from .kept import user_cache

__all__ = ["Native", "kept_in", "native"]

_TYPES = {"u1": ("uint8", np.uint8), "i4": ("int32", np.int32), "i8": ("int64", np.int64), "b1": ("boolean", np.bool_)}
_ARGUMENT = re.compile(r"^(u1|i4|i8|b1)(\[,*\])?$")
_HARMLESS = re.compile(r"^(llvm\.|mem(cpy|move|set|cmp)$)")
_DECLARED = re.compile(r'^declare [^@]*@"?([^"(]+)"?\(', re.MULTILINE)
_OPTIONS = {"nogil": True, "_nrt": False, "error_model": "numpy"}
_FLAT, _OBJECT = b"flat", b"elf\0"  # what a kept file holds: the entry's place (8 bytes) and an image, or object code
_PROCESSOR = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")  # of /proc/cpuinfo, what code is made for
_MARK_BYTES = 16
_loaded: list[Any] = []  # engines own the code that they loaded: for as long as the process lives


def native(signature: str, *, uses: Sequence[Callable[..., Any]] = ()) -> Callable[[Callable[..., Any]], Native]:
    """Compile the function below as `signature` says: arguments such as `i8`, `u1[]`, `i8[,]` (C order), then `->` and how many integers it returns.

    `uses`: plain functions that it calls; each may call those before it.
    """
    return lambda function: Native(function, signature, tuple(uses))


class Native:
    """A function of arrays and integers; the first call loads or compiles it. Calls release the interpreter lock."""

    def __init__(self, function: Callable[..., Any], signature: str, uses: tuple[Callable[..., Any], ...]) -> None:
        arguments, _, results = signature.partition("->")
        matches = [_ARGUMENT.match(word) for word in arguments.split()]
        self.kinds = [(m[1], (m[2] or "").count(",") + 1 if m[2] else 0) for m in matches if m]
        self.results = int(results)
        self.function, self.signature, self.uses = function, signature, uses
        self.__doc__, self.__name__ = function.__doc__, function.__name__

    def __call__(self, *values: Any) -> Any:
        return self.entry(*values)

    @cached_property
    def entry(self) -> Callable[..., Any]:
        """What runs: loaded object code, or numba's own."""
        name = f"{self.function.__module__}.{self.__name__}"
        place = kept_in()
        path = place / f"{name}-{self.key}.o" if place else None
        code = _read(path) if path else None
        if code is None and path is not None:
            with _alone(path.with_suffix(".lock")):
                code = _read(path)  # by whoever was first
                if code is None and (code := self._compiled()):
                    _write(path, code)
        return self._bound(code) if code else self.plain

    @cached_property
    def plain(self) -> Callable[..., Any]:
        """The function as numba runs it."""
        from numba import njit

        compiled: Callable[..., Any] = njit(**_OPTIONS)(self._closed())
        return compiled

    @cached_property
    def key(self) -> str:
        files = sorted({f.__code__.co_filename for f in (self.function, *self.uses)} | {__file__, flat_code.__file__})
        said = "\0".join([self.signature, sys.version, _processor(), *map(_version, ("llvmlite", "numba"))]).encode()
        return _mark(b"\0".join([said, *(Path(file).read_bytes() for file in files)])).hex()

    def _closed(self) -> Callable[..., Any]:
        """The function with the ones that it uses compiled into it."""
        from numba import njit

        known = {name: value for f in (*self.uses, self.function) for name, value in f.__globals__.items()}
        for used in self.uses:
            known[used.__name__] = njit(**_OPTIONS)(types.FunctionType(used.__code__, known, used.__name__, used.__defaults__))
        return types.FunctionType(self.function.__code__, known, self.__name__, self.function.__defaults__)

    def _compiled(self) -> bytes | None:
        """What is kept: code with one entry of a known name; None where it needs functions of numba."""
        from llvmlite import binding
        from numba import types as nb
        from numba.core import compiler, registry

        kinds = [getattr(nb, _TYPES[kind][0]) for kind, _ in self.kinds]
        arguments = tuple(nb.Array(t, d, "C") if d else t for t, (_, d) in zip(kinds, self.kinds, strict=True))
        flags = compiler.Flags()
        flags.no_cpython_wrapper, flags.no_cfunc_wrapper, flags.error_model = True, True, "numpy"
        typing, target = registry.cpu_target.typing_context, registry.cpu_target.target_context
        typing.refresh()
        target.refresh()
        made = compiler.compile_extra(typing, target, self._closed(), arguments, None, flags, {})
        text = made.library.get_llvm_str()
        if any(not _HARMLESS.match(name) for name in _DECLARED.findall(text)):
            return None
        module = binding.parse_assembly(text)
        for function in module.functions:
            if function.name == made.fndesc.llvm_func_name:
                function.name = "entry"
                function.linkage = "external"
            elif not function.is_declaration:
                function.linkage = "internal"
        _inline(binding, module)
        free = flat(bytes(_machine(binding, reloc="pic", codemodel="small").emit_object(module)), "entry")
        if free is not None and loaded(free[1]) is not None:
            return _FLAT + free[0].to_bytes(8, "little") + free[1]
        return _OBJECT + bytes(_machine(binding).emit_object(module))

    def _bound(self, code: bytes) -> Callable[..., Any]:
        address = _address(code)
        if address is None:
            return self.plain
        fields: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
        for _, dimensions in self.kinds:
            array = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * (2 * dimensions)]
            fields += array if dimensions else [ctypes.c_int64]
        call = ctypes.CFUNCTYPE(ctypes.c_int32, *fields)(address)
        kinds, results = self.kinds, self.results
        dtypes = [np.dtype(_TYPES[kind][1]) for kind, _ in kinds]
        name = self.__name__

        def run(*values: Any) -> Any:
            answer, problem = (ctypes.c_int64 * max(results, 1))(), ctypes.c_void_p()
            words: list[Any] = [ctypes.addressof(answer), ctypes.addressof(problem)]
            for value, (_, dimensions), dtype in zip(values, kinds, dtypes, strict=True):
                if not dimensions:
                    words.append(int(value))
                    continue
                if value.dtype != dtype or value.ndim != dimensions or not value.flags.c_contiguous:
                    raise TypeError(f"{name}: an array of {value.dtype} with strides {value.strides} where {dtype} in C order is due")
                place = value.__array_interface__["data"][0]
                words += [None, None, value.size, value.itemsize, place, *value.shape, *value.strides]
            if call(*words):
                raise RuntimeError(f"{name}: the kernel raised")
            return answer[0] if results == 1 else tuple(answer) if results else None

        return run


def _inline(binding: Any, module: Any) -> None:
    """Put small functions into those that call them, now that nobody else can call them: a call hands over seven words for each array."""
    builder = binding.create_pass_builder(_machine(binding), binding.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)


def _address(code: bytes) -> int | None:
    """Where the entry of kept code is once it is in memory; None where this process may run none."""
    if code[:4] == _FLAT:
        start = loaded(code[12:])
        return None if start is None else start + int.from_bytes(code[4:12], "little")
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(binding))
    engine.add_object_file(binding.ObjectFileRef.from_data(code[4:]))
    engine.finalize_object()
    _loaded.append(engine)
    return int(engine.get_function_address("entry"))


def _machine(binding: Any, *, reloc: str = "default", codemodel: str = "jitdefault") -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True, reloc=reloc, codemodel=codemodel
    )  # fmt: skip


@cache
def _processor() -> str:
    """What code is made for, as the system says; where it does not, as llvmlite finds out."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            first = file.read(1 << 14).decode("utf-8", "replace").partition("\n\n")[0]  # of many cores, which are alike
    except OSError:
        first = ""
    said = [line for line in first.splitlines() if line.partition(":")[0].strip() in _PROCESSOR]
    if any(line.startswith(("flags", "Features")) for line in said):
        return "\n".join(said)
    from llvmlite import binding

    return f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"


@cache
def _version(package: str) -> str:
    """The version of an installed package, without loading it."""
    found = importlib.util.find_spec(package)
    file = Path(found.origin).with_name("_version.py") if found and found.origin else None
    if file and file.is_file():
        return file.read_text()
    from importlib.metadata import version

    return version(package)


def kept_in() -> Path | None:
    """The folder for object code: beside numba's own cache where one is named, else where this user keeps caches."""
    named = os.environ.get("NUMBA_CACHE_DIR", "")
    folder = Path(named) / "object-code" if named else user_cache("meshwright/kernels")
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _mark(data: bytes) -> bytes:
    """What tells damage, or another version of a source, from chance; `hashlib` would load OpenSSL, a hundredth of a short command's time."""
    return zlib.crc32(data).to_bytes(4, "little") + zlib.adler32(data).to_bytes(4, "little") + len(data).to_bytes(8, "little")


def _read(path: Path) -> bytes | None:
    """Code that is whole and this user's own: it will be run."""
    try:
        if path.stat().st_uid not in (os.getuid(), 0):
            return None
        data = path.read_bytes()
    except OSError:
        return None
    return data[_MARK_BYTES:] if _mark(data[_MARK_BYTES:]) == data[:_MARK_BYTES] else None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time: compiling takes seconds. Where files cannot be locked, each compiles."""
    try:
        import fcntl

        file = path.open("w")
    except (ImportError, OSError):
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes
        yield


def _write(path: Path, code: bytes) -> None:
    """All or nothing; a folder that is full keeps nothing."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(_mark(code) + code)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
