"""Running kernels without a GPU: Triton's interpreter, with the shims that make it trustworthy.

`TRITON_INTERPRET` is read when a kernel is decorated, so interpreted tests need a process of their own. A test file of kernels ends with
`interpreter.own_process(globals(), __file__)`: in an ordinary process its tests are replaced by one that runs the file in a child, where they are
collected as written. `TRITON_INTERPRET=1 pytest tests/kernels/test_triton_pool.py -k name` runs single ones.

Inside, `shims()` patches the interpreter: bfloat16 is computed in fp32 and rounded to nearest even (it multiplies bit patterns otherwise), accesses
outside every tensor argument raise (garbage otherwise), and `torch.empty` returns NaN, so that an element no kernel wrote is seen.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

INSTALLED = importlib.util.find_spec("triton") is not None
ACTIVE = INSTALLED and os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).resolve().parents[2]


def run_alone(file: str, limit_s: int = 280) -> None:
    """Run a test file under the interpreter in a child process; fail with its output."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--durations=5", file]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def own_process(names: dict[str, Any], file: str) -> None:
    """In an ordinary process, put one test that runs the whole file under the interpreter in the place of the tests in `names`."""
    if ACTIVE:
        return
    for name in [name for name in names if name.startswith("test_")]:
        del names[name]

    @pytest.mark.skipif(not INSTALLED, reason="triton is not installed: the kernels are not tested (pip install mitigate[gpu])")
    def test_under_the_interpreter() -> None:
        run_alone(file)

    names["test_under_the_interpreter"] = test_under_the_interpreter


# ---------------------------------------------------------------------------------------------------------------------- bfloat16


def widen(bits: np.ndarray) -> np.ndarray:
    """fp32 values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns of fp32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _bf16_patches() -> dict[str, Callable[..., Any]]:
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def wide(x: TensorHandle) -> TensorHandle:
        return TensorHandle(widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def back(x: TensorHandle) -> TensorHandle:
        return TensorHandle(narrow(x.data), tl.bfloat16) if x.data.dtype == np.float32 else x

    plain_binary, plain_unary, plain_dot, plain_cast = (getattr(InterpreterBuilder, name) for name in ("binary_op", "unary_op", "create_dot", "cast_impl"))
    plain_fp_to_fp = InterpreterBuilder.create_fp_to_fp

    def binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        if lhs.dtype.scalar != tl.bfloat16:
            return plain_binary(self, lhs, rhs, op)
        result = op(widen(lhs.data), widen(rhs.data))
        return TensorHandle(result, tl.int1) if result.dtype == bool else back(TensorHandle(result, tl.float32))

    def unary_op(self: Any, arg: TensorHandle, op: Any) -> TensorHandle:
        return back(plain_unary(self, wide(arg), op)) if arg.dtype.scalar == tl.bfloat16 else plain_unary(self, arg, op)

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> TensorHandle:
        assert a.dtype.scalar == b.dtype.scalar, f"tl.dot of {a.dtype} and {b.dtype}: the compiler rejects it"
        assert a.data.shape[-1] >= 16, f"tl.dot with K = {a.data.shape[-1]} < 16: the compiler rejects it"
        return plain_dot(self, wide(a), wide(b), d, *rest)

    def cast_impl(self: Any, src: TensorHandle, dst_type: Any) -> TensorHandle:
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar != tl.bfloat16:
            return TensorHandle(narrow(src.data.astype(np.float32)), tl.bfloat16)
        return plain_cast(self, wide(src) if dst_type.scalar != tl.bfloat16 else src, dst_type)

    def create_fp_to_fp(self: Any, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        if tl.bfloat16 in (src.dtype.scalar, dst_type.scalar):
            return cast_impl(self, src, dst_type)
        return plain_fp_to_fp(self, src, dst_type, rounding_mode)

    patches = {"binary_op": binary_op, "unary_op": unary_op, "create_dot": create_dot, "cast_impl": cast_impl, "create_fp_to_fp": create_fp_to_fp}
    return patches


def _no_bf16_reduction(plain: Callable[..., Any]) -> Callable[..., Any]:
    from triton import language as tl

    def apply_impl(self: Any, values: tuple[Any, ...]) -> Any:
        assert all(x.dtype.scalar != tl.bfloat16 for x in values), "a reduction over bfloat16: cast it to fp32 at the load"
        return plain(self, values)

    return apply_impl


# ---------------------------------------------------------------------------------------------------------------------- bounds


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a strided tensor and the one after its last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _bounds_patches(spans: list[tuple[int, int]]) -> dict[str, Callable[..., Any]]:
    from triton.runtime.interpreter import InterpreterBuilder

    plain_load, plain_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def check(ptrs: Any, mask: Any, what: str) -> None:
        if not np.any(mask.data):
            return
        address = np.broadcast_to(ptrs.data, np.broadcast_shapes(ptrs.data.shape, mask.data.shape))[np.broadcast_to(mask.data, ptrs.data.shape)]
        width = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        low, high = int(address.min()), int(address.max()) + width
        if any(start <= low and high <= stop for start, stop in spans):
            return
        inside = np.zeros(address.shape, dtype=bool)
        for start, stop in spans:
            inside |= (address >= start) & (address + np.uint64(width) <= stop)
        assert inside.all(), f"{what} outside every tensor argument"

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs, mask, "load")
        return plain_load(self, ptrs, mask, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs, mask, "store")
        return plain_store(self, ptrs, value, mask, *rest)

    return {"create_masked_load": create_masked_load, "create_masked_store": create_masked_store}


def _note_spans(plain: Callable[..., Any], spans: list[tuple[int, int]]) -> Callable[..., Any]:
    """The interpreter copies no CPU tensor's storage, so a launch's arguments have the addresses that its kernel sees."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        spans[:] = [span(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        return plain(self, *args, **kwargs)

    return __call__


# ---------------------------------------------------------------------------------------------------------------------- speed and poison


def _patch_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter patches the whole language again at every call of a device function; where it is patched already, that is a waste."""
    from triton import language as tl
    from triton.runtime import interpreter

    def patch(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if not languages or any(tl.core.is_builtin(language.load) for language in languages):
            return plain(fn)
        return interpreter._LangPatchScope() if hasattr(interpreter, "_LangPatchScope") else None

    return patch


def _index_of_one(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Triton 3.6 cannot take a kernel's integer as the bound of a range with NumPy 2.4."""

    def patch(tensor: Any, *scope: Any) -> None:
        plain(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    return patch


def poisoned(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.empty` or `empty_like` whose floats are NaN and whose integers are far out of range."""

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = plain(*args, **kwargs)
        return out.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).min)

    return empty


@contextlib.contextmanager
def shims() -> Iterator[None]:
    """All shims at once; only for the process that runs under the interpreter."""
    from triton.runtime import interpreter

    spans: list[tuple[int, int]] = []
    with contextlib.ExitStack() as stack:
        for name, patch in (_bf16_patches() | _bounds_patches(spans)).items():
            stack.enter_context(mock.patch.object(interpreter.InterpreterBuilder, name, patch))
        for kind in (interpreter.ReduceOps, interpreter.ScanOps):
            stack.enter_context(mock.patch.object(kind, "apply_impl", _no_bf16_reduction(kind.apply_impl)))
        stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", _note_spans(interpreter.GridExecutor.__call__, spans)))
        stack.enter_context(mock.patch.object(interpreter, "_patch_lang_tensor", _index_of_one(interpreter._patch_lang_tensor)))
        stack.enter_context(mock.patch.object(interpreter, "_patch_lang", _patch_once(interpreter._patch_lang)))
        for name in ("empty", "empty_like"):
            stack.enter_context(mock.patch.object(torch, name, poisoned(getattr(torch, name))))
        yield
