"""Products of factors in bfloat16 and float16 against float64, with the kernel of a GPU or one in its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from marquardt.layers import blocks as bilinear
from marquardt.layers import blocks as coarse
from marquardt.layers.blocks import Bilinear, Product
from support.reference import error
from support.steps import CUDA

EPS = torch.finfo(torch.float32).eps
EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])


@pytest.fixture
def kernels(monkeypatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """A CPU does as a GPU does, and the dtypes that its kernel was given."""
    own, given = coarse.kernel, []

    def kernel(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        given.append((left.dtype, right.dtype))
        return own(left, right, out) if left.is_cuda else torch.matmul(left.float(), right.float(), out=out)

    monkeypatch.setattr(coarse, "kernel", kernel)
    for module in (coarse, bilinear):
        monkeypatch.setattr(module, "fast", lambda t: t.dtype in coarse.COARSE)
    return given


def test_the_digits_of_float32():
    t = torch.randn(50) * 10.0 ** torch.arange(-25, 25)
    parts = coarse.digits(t)
    assert {p.dtype for p in parts} == {torch.bfloat16}
    assert torch.equal(sum(p.double() for p in parts), t.double())


@EVERY_DEVICE
@pytest.mark.parametrize("many", [(), (3,)], ids=["one", "many"])
@pytest.mark.parametrize("right", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("left", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_of_every_precision(left, right, many, device, kernels):
    """No digit of a factor is lost, and those that are coarse go to the kernel as they are."""
    a = torch.randn(*many, 300, 40, device=device).to(left)
    b = torch.randn(*many, 40, 260, device=device).to(right)
    found = coarse.times(a, b, torch.float32)
    assert found.dtype == torch.float32
    assert error(found.double(), a.double() @ b.double()) < 20 * EPS
    taken = left == right != torch.float32 or {left, right} == {torch.bfloat16, torch.float32}
    assert kernels == ([(left if left == right else torch.bfloat16,) * 2] if taken else [])


def test_float64_and_few_columns_are_multiplied_as_ever(kernels):
    a, b = torch.randn(30, 40).bfloat16(), torch.randn(40, 20)
    assert torch.equal(coarse.times(a, b, torch.float32), a.float() @ b)
    assert torch.equal(coarse.times(a, a.T, torch.float64), a.double() @ a.double().T)
    assert kernels == []


@EVERY_DEVICE
@pytest.mark.parametrize(
    "shape", [(1, 4, 80, 1, 300, 260), (1, 4, 80, 1, 20, 30), (3, 4, 1, 1, 20, 30), (2, 3, 70, 1, 4, 5)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_blocks_of_coarse_factors(dtype, shape, device, kernels):
    """All their products are those of the same numbers in float64, but for one rounding in J̃ᵀw."""
    R, N, P, G, O, I = shape
    a, delta = torch.randn(N, P, G, I, device=device).to(dtype), torch.randn(R, N, P, G, O, device=device).to(dtype)
    weight, bias = torch.zeros(O, I, device=device), torch.zeros(O, device=device)
    block = Bilinear(a, delta, weight, bias)
    exact = Bilinear(a.double(), delta.double(), weight.double(), bias.double())
    v, w = [torch.randn(t.numel(), device=device) for t in (weight, bias)], torch.randn(R * N, device=device)
    assert error(block.apply(v).double(), exact.apply([t.double() for t in v])) < 1e-5
    rounded = R == 1 and dtype == torch.bfloat16  # the product of w and a factor
    assert error(block.pull(w).double(), exact.pull(w.double())) < (2.0**-8 if rounded else 1e-5)
    assert error(block.diagonal().double(), exact.diagonal()) < 1e-5
    K, image = torch.zeros(R * N, R * N, device=device), torch.zeros(R * N, device=device)
    block.gram(K, block, Product(v, image))
    rows = exact.rows(torch.float64)
    assert error(K.double(), rows @ rows.T) < 1e-5
    assert error(image.double(), exact.apply([t.double() for t in v])) < 1e-5
    assert kernels
    assert {t for pair in kernels for t in pair} == {dtype}
    assert block.a.dtype == block.delta.dtype == torch.float32
