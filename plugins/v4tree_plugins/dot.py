"""The matrix product of the kernels, with the switch that the Triton interpreter needs for bfloat16."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a b with fp32 accumulation. PRECISION `upcast` widens the operands first, which is exact: the interpreter's own product
    of bfloat16 tensors multiplies bit patterns. Any other value is Triton's input_precision for fp32 operands."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


def default_precision() -> str:
    """Precision with which wrappers launch by default: `upcast` under the interpreter, else 3 x TF32 for fp32 operands."""
    return "upcast" if triton.knobs.runtime.interpret else "tf32x3"
