"""Products in neural networks: ``linear`` as in torch.nn.functional, and ``patch``, which gives it to layers that gain."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.nn import functional

from .dispatch import Dispatcher, dispatcher, matmul
from .errors import InputError
from .problem import Problem
from .runtime.operands import DTYPES


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as torch.nn.functional.linear does; x [..., K], weight [N, K], bias [N].

    With a bias it is torch.nn.functional.linear: cuBLAS adds the bias while it stores the product, no generated kernel does.
    Differentiable; works under torch.compile and in CUDA graphs.
    """
    if bias is not None or weight.dim() != 2 or x.dim() < 2 or torch.is_autocast_enabled(x.device.type):
        return functional.linear(x, weight, bias)
    if x.dim() == 2:
        return matmul(x, weight.t())
    return matmul(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], weight.shape[0])


class AutogemmLinear(torch.nn.Linear):
    """An nn.Linear whose forward is ``linear``; ``patch`` makes existing layers into it, parameters and hooks untouched."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the product of ``input`` [..., in_features] with the transposed weight."""
        return linear(input, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """One tuned shape of a layer.

    Attributes:
        tokens: rows of the layer's input, M.
        ratio: measured time of cuBLAS over that of what runs, a kernel or an algorithm of cuBLASLt; None if it is the bound of
            a neighbour that speaks for the shape.
        reason: the decision's.
    """

    tokens: int
    ratio: float | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """What ``patch`` made of one nn.Linear.

    Attributes:
        name: path in the model.
        gains: shapes for which a kernel runs; empty if the layer was left as it was.
        reason: why it was left; empty if it was swapped.
    """

    name: str
    in_features: int
    out_features: int
    dtype: str
    gains: tuple[Gain, ...]
    reason: str = ""

    def __str__(self) -> str:
        head = f"{self.name or '(the model)'}: {self.out_features}x{self.in_features} {self.dtype}"
        if not self.gains:
            return f"{head} kept: {self.reason}"
        shown = ", ".join(f"M={g.tokens}" + (f" {g.ratio:.3f}x" if g.ratio is not None else "") for g in self.gains)
        return f"{head} swapped: {shown}"


@dataclass(frozen=True, kw_only=True)
class PatchReport:
    """What ``patch`` did to a model; ``undo`` takes it back. Usable in a with-statement, which undoes it at the end."""

    swapped: tuple[LayerReport, ...]
    kept: tuple[LayerReport, ...]
    _modules: list[weakref.ref[torch.nn.Linear]] = field(repr=False)

    def undo(self) -> int:
        """Make the swapped layers plain nn.Linear again and return how many there still were; a second call returns 0."""
        undone = 0
        for reference in self._modules:
            module = reference()
            if type(module) is AutogemmLinear:
                module.__class__ = torch.nn.Linear  # type: ignore[assignment]
                undone += 1
        self._modules.clear()
        return undone

    def __enter__(self) -> PatchReport:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{len(self.swapped)} layers swapped, {len(self.kept)} kept",
                *(str(layer) for layer in (*self.swapped, *self.kept)),
            ]
        )


_NOT_PLAIN: Final = "not a plain nn.Linear"


def patch(model: torch.nn.Module, *, tokens: Sequence[int] | None = None, using: Dispatcher | None = None) -> PatchReport:
    """Swap the nn.Linear layers of ``model`` for which something measured beats torch's cuBLAS, in place; report on each layer.

    That is a kernel, or an algorithm of cuBLASLt that a row names. A swapped layer keeps its parameters, hooks, name and
    state_dict; a shape for which nothing was measured still runs torch's. Call it after the model is on its device in its type,
    and before torch.compile. Kernels of the gaining shapes are loaded.

    Args:
        tokens: rows of the layers' inputs (batch times sequence) that matter; by default all that were tuned.
        using: dispatcher to ask; by default the one of ``matmul``.

    Raises:
        InputError: a token count that is not positive.
    """
    if tokens is not None and any(isinstance(m, bool) or not isinstance(m, int) or m < 1 for m in tokens):
        raise InputError(f"tokens must be positive integers, got {list(tokens)}")
    chosen = using if using is not None else dispatcher()
    swapped, kept, modules = [], [], []
    for name, module in _linears(model):
        report = _judge(name, module, tokens, chosen)
        if report.gains:
            module.__class__ = AutogemmLinear
            modules.append(weakref.ref(module))
            swapped.append(report)
        else:
            kept.append(report)
    return PatchReport(swapped=tuple(swapped), kept=tuple(kept), _modules=modules)


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name, module


def _judge(name: str, module: torch.nn.Linear, tokens: Sequence[int] | None, chosen: Dispatcher) -> LayerReport:
    weight = module.weight
    dtype = DTYPES.get(weight.dtype)
    gains: tuple[Gain, ...] = ()
    if type(module) is AutogemmLinear:
        reason = "swapped already"
    elif type(module) is not torch.nn.Linear:
        reason = f"{_NOT_PLAIN} but {type(module).__name__}"
    elif module.bias is not None:
        reason = "it has a bias, which cuBLAS adds while it stores the product"
    elif weight.device.type != chosen.machine.device_type:
        reason = f"it is on {weight.device}"
    elif dtype is None or type(weight) is not torch.nn.Parameter:
        reason = f"its weight is a {weight.dtype} {type(weight).__name__}; kernels take float16 and bfloat16 parameters"
    elif weight.stride() != (weight.shape[1], 1):
        reason = f"its weight has strides {weight.stride()}"
    else:
        gains, reason = _gains(module, dtype, tokens, chosen)
    return LayerReport(
        name=name, in_features=module.in_features, out_features=module.out_features,
        dtype=str(weight.dtype).removeprefix("torch."), gains=gains, reason="" if gains else reason,
    )  # fmt: skip


def _gains(
    module: torch.nn.Linear, dtype: str, tokens: Sequence[int] | None, chosen: Dispatcher
) -> tuple[tuple[Gain, ...], str]:
    index, (n, k) = module.weight.get_device(), module.weight.shape
    device = chosen.machine.device(index)
    tuned = {
        row.key.m
        for row in chosen.table.rows
        if (row.key.n, row.key.k, row.key.dtype, row.key.gpu) == (n, k, dtype, device.gpu)
    }
    if not tuned and tokens is None:
        return (), f"no row of {device.gpu} is for N={n}, K={k} in {dtype}"
    found, reasons = [], []
    for m in sorted(tuned if tokens is None else set(tokens)):
        decision = chosen.decide(Problem(m=m, n=n, k=k, dtype=dtype), index)
        if decision.runs != "cublas" and decision.status == "measured":
            ratio = decision.row.ratio(decision.runs) if decision.source == "exact" and decision.row is not None else None
            found.append(Gain(tokens=m, ratio=ratio, reason=decision.reason))
        else:
            reasons.append(f"M={m}: {decision.reason}")
    return tuple(found), "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
