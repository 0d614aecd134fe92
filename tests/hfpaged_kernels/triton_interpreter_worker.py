"""Runs a share of the checks of a table (`triton_cases`, `triton_quantized_cases`) in Triton's interpreter and prints
{name: "" or what is wrong} as JSON.

A process of its own, with TRITON_INTERPRET=1, as Triton looks at the variable when kernels are imported.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def give_the_interpreter_bfloat16() -> None:
    """numpy has no bfloat16, and the interpreter keeps the bits as uint16.

    tl.dot would multiply these bits as integers, the conversion from float32 loses the carry into the exponent when
    a mantissa rounds up to the next power of two, and that to float32 loses subnormal numbers. All are put right here.
    """
    convert = interpreter._convert_float
    builder = interpreter.InterpreterBuilder

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(data).view(np.uint32).reshape(data.shape)
            to_nearest_even = np.uint32(0x7FFF) + ((bits >> 16) & 1)
            rounded = ((bits + to_nearest_even) >> 16).astype(np.uint16)
            return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), rounded)
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.asarray(data).astype(np.uint32) << 16
        return convert(data, source, target, rounding)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        return interpreter.TensorHandle(np.matmul(widened(a), widened(b)) + d.data, d.dtype.scalar)

    interpreter._convert_float = convert_float
    builder.create_dot = create_dot


def let_the_interpreter_count_with_new_numpy() -> None:
    """Bounds of loops are arrays of one element there; numpy 2.4 takes no such array for an int any more."""
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_lang_tensor


class Kept:
    """Where the interpreter would undo its patch of the language behind each launch."""

    def restore(self) -> None:
        """Nobody needs another language here."""


def patch_the_language_once() -> None:
    """Two thirds of the time of all checks went into patching and restoring all of triton.language for each launch."""
    patch, done = interpreter._patch_lang, {}

    def patch_lang(function: Any) -> Kept:
        module = id(function.__globals__)
        if module not in done:
            done[module] = patch(function)
        return Kept()

    interpreter._patch_lang = patch_lang


def outcome(check: Any, case: Any) -> str:
    try:
        check(case, "cpu")
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    checks = importlib.import_module(sys.argv[1]).CHECKS
    share, shares = int(sys.argv[2]), int(sys.argv[3])
    give_the_interpreter_bfloat16()
    let_the_interpreter_count_with_new_numpy()
    patch_the_language_once()
    print(json.dumps({name: outcome(*checks[name]) for name in list(checks)[share::shares]}))
