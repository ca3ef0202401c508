"""The full Hessian as an n×n matrix: Newton's method, for small models."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..jacobian.chunk import Chunk
from ..jacobian.linearization import Linearization
from ..metric import Diagonal
from .contract import Curvature, FactorizationError, one_each
from .dense import SMALL

# Numbers that the cotangents of one batched backward pass may hold.
BATCH = 1 << 22


@dataclass(frozen=True)
class Hessian:
    """G = ∇²f, all of it and not only its Gauss-Newton part: Newton's method, for up to some thousand parameters.

    It needs a model that can be differentiated twice, and may be indefinite: where G + λD is not positive definite the
    step fails and λ rises. Damping goes by |diag ∇²f|.
    """

    @property
    def chunk(self) -> int | None:
        return None

    @property
    def by_sample(self) -> bool:
        return False

    def represent(self, lin: Linearization) -> HessianCurvature:
        return HessianCurvature(lin)


class HessianCurvature(Curvature):
    def __init__(self, lin: Linearization) -> None:
        dtype = torch.float64 if lin.n <= SMALL else lin.params[0].dtype
        self.G = torch.zeros(lin.n, lin.n, dtype=dtype, device=lin.device)
        self._g = torch.zeros(lin.n, dtype=dtype, device=lin.device)
        lin.split(lin.chunk)  # a chunk from before may come from kernels that cannot be differentiated twice
        lin.keep_graph = True
        with twice_differentiable(lin.model):
            for chunk in lin.chunks():
                slopes = slope_with_graph(chunk)
                self.G += hessian_of(slopes, lin.params)
                self._g += flat([None if s is None else s.detach() for s in slopes], lin.params)
        self.G *= lin.scale
        self._g *= lin.scale
        super().__init__(lin)
        self.rank = lin.n

    @property
    def gradient(self) -> Tensor:
        return self._g.to(self.lin.theta.dtype)

    def __matmul__(self, v: Tensor) -> Tensor:
        return (self.G @ v.to(self.G.dtype)).to(v.dtype)

    def newton(self, damping: Diagonal | Tensor) -> Tensor:
        """(G + A)⁻¹g by Cholesky, which is also the test for positive definiteness: so no jitter."""
        H = self.G.double()
        if H is self.G:
            H = H.clone()
        H.diagonal().add_(Diagonal.of(damping, self.lin.sizes).entries(self.lin.sizes))
        diagonal = H.diagonal()
        if not bool((diagonal > 0).all()):  # also where it is NaN
            raise FactorizationError(NOT_POSITIVE)
        s = diagonal.rsqrt()
        L, info = torch.linalg.cholesky_ex(H * s * s[:, None])  # unit diagonal: the units of the parameters are gone
        # A pivot that is all rounding has no sign.
        smallest = L.diagonal().square().min()
        if not bool((info == 0) & (smallest > len(H) * torch.finfo(H.dtype).eps)):
            raise FactorizationError(NOT_POSITIVE)
        x: Tensor = torch.cholesky_solve((s * self._g.double())[:, None], L)[:, 0] * s
        if not bool(x.isfinite().all()):
            raise FactorizationError("the step is not finite")
        return x.to(self.lin.theta.dtype)

    # What damping asks for: never negative, so |diag ∇²f| in the place of diag ∇²f.

    def diagonal(self) -> Tensor:
        return self.G.diagonal().to(self.lin.theta.dtype)

    def trace(self) -> Tensor:
        """Σ|∂²f/∂θᵢ²|"""
        return self.diagonal().abs().sum()

    def traces(self) -> Diagonal:
        """The mean of |∂²f/∂θᵢ²| in every parameter"""
        return one_each([d.abs().mean() for d in self.diagonal().split(self.lin.sizes)])

    def maximum(self, D: Diagonal | None, floor: float) -> Diagonal:
        """D ← max(D, |diag ∇²f|)"""
        diagonal = self.diagonal().abs()
        found = Diagonal.of(diagonal.clamp(min=floor) if D is None else diagonal, self.lin.sizes)
        return (found if D is None else D.maximum(found)).known(self.lin.params)

    def factored_maximum(self, D: Diagonal | None) -> Diagonal:
        """The diagonal of a Hessian has no factors: the same element by element"""
        return self.maximum(D, 0.0)


NOT_POSITIVE = "the Hessian with this damping is not positive definite"
ONCE = "the model cannot be differentiated twice"
WAY_OUT = "Use mq.Dense(), mq.Gram() or mq.MatrixFree(), which need no second derivatives"
NOT_SYMMETRIC = (
    "the second derivatives of the model are not symmetric: one of its operations has a backward pass that torch "
    f"cannot differentiate again (weight_norm is one). {WAY_OUT}"
)


class Shared:
    """A setting of the whole program: the first thread that enters makes it, the last one that leaves takes it back."""

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]) -> None:
        self.setting = setting
        self.lock, self.inside = threading.Lock(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if not self.inside:
                self.made = self.setting()
                self.made.__enter__()
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self.made.__exit__(None, None, None)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled


PLAIN_ATTENTION = Shared(lambda: sdpa_kernel(SDPBackend.MATH))
PLAIN_RECURRENCE = Shared(_without_cudnn)


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Kernels that can be differentiated twice, where a fused one cannot: attention, and cuDNN's recurrent layers."""
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    with PLAIN_ATTENTION(), PLAIN_RECURRENCE() if recurrent else nullcontext():
        yield


def slope_with_graph(chunk: Chunk) -> list[Tensor | None]:
    """∂value/∂θ by parameters, to be differentiated again; None for those that the outputs do not depend on."""
    lin, batch = chunk.lin, chunk.batch
    with torch.enable_grad():
        value = lin.criterion.value(chunk.graph, batch.targets, batch.weight)
        slopes = torch.autograd.grad(value, lin.params, create_graph=True, allow_unused=True)
        found: list[Tensor | None] = [s.to_dense() if s is not None and s.is_sparse else s for s in slopes]
    if ends_early(found):
        raise ValueError(f"{ONCE}. {WAY_OUT}")
    return found


def ends_early(slopes: Sequence[Tensor | None]) -> bool:
    """Whether a @once_differentiable function cuts the graph off: autograd takes what lies behind it for constant."""
    todo = [s.grad_fn for s in slopes if s is not None and s.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node.name() == "torch::autograd::Error":
            return True
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        todo += new
    return False


def hessian_of(slopes: Sequence[Tensor | None], params: Sequence[Tensor]) -> Tensor:
    """∂slopes/∂θ: (n, n), many rows in one backward pass, or one by one where vmap refuses or is wrong."""
    for batched in (True, False):
        try:
            H = torch.cat([rows_of(s, p, params, batched) for s, p in zip(slopes, params, strict=True)])
        except RuntimeError as error:
            if not batched or "out of memory" in str(error):
                raise
            continue  # an operation whose backward vmap refuses
        # Rounding in float32 leaves 1e-5; a wrong derivative is wrong by far. What is not finite, newton sees.
        if not bool((H - H.T).norm() > (1e-8 if H.dtype == torch.float64 else 1e-2) * H.norm()):
            return (H + H.T) / 2
    raise ValueError(NOT_SYMMETRIC)


def rows_of(slope: Tensor | None, p: Tensor, params: Sequence[Tensor], batched: bool) -> Tensor:
    """∂slope/∂θ for the slope of one parameter: (its size, n)"""
    n = sum(q.numel() for q in params)
    if slope is None or not slope.requires_grad:  # the loss is linear in it
        return p.new_zeros(p.numel(), n)
    pieces = []
    size = max(1, BATCH // n)
    for first in range(0, p.numel(), size):
        rows = min(size, p.numel() - first)
        unit = torch.eye(rows, p.numel(), dtype=p.dtype, device=p.device).roll(first, 1).view(-1, *p.shape)
        if not batched:
            pieces += [flat(again(slope, params, one), params)[None] for one in unit]
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            grads = torch.autograd.grad(
                slope, params, unit, retain_graph=True, allow_unused=True, is_grads_batched=True
            )  # fmt: skip
        pairs = zip(grads, params, strict=True)
        pieces.append(
            torch.cat([q.new_zeros(rows, q.numel()) if g is None else g.reshape(rows, -1) for g, q in pairs], 1)
        )
    return torch.cat(pieces)


def again(
    slopes: Tensor | Sequence[Tensor], params: Sequence[Tensor], along: Tensor | Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """∂(slopesᵀalong)/∂θ by parameters"""
    try:
        return torch.autograd.grad(slopes, params, along, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"{ONCE}: {error}. {WAY_OUT}") from error


def flat(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> Tensor:
    """One vector: (n,)"""
    pairs = zip(grads, params, strict=True)
    return torch.cat([p.new_zeros(p.numel()) if g is None else g.to_dense().flatten() for g, p in pairs])
