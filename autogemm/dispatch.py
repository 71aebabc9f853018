"""From tensors to a kernel: ``matmul`` looks up what was decided for the problem and launches it, or calls torch.matmul.

What is launched is a generated kernel, or an algorithm of cuBLASLt that a row names. Nothing here compiles, times, searches or
synchronizes. The first call of a kind reads rows and loads a cubin that was compiled before, or restores the algorithm; later
calls are one dict look-up, a few checks and a launch. Whatever no kernel can take, or nothing measured supports, runs
torch.matmul with its result or its error; ``explain`` says which and why.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.autograd import forward_ad

from . import torch_ops
from .algorithm import Algorithm
from .arch import ArchName
from .binary import Binary
from .config import LaunchKnobs
from .cuda_machine import ARCH_OF, CudaMachine
from .database import Database
from .decision import Decision, Notice, Table, decide, screen
from .device import Device
from .errors import AutogemmError, DatabaseError, InputError
from .kernel_store import ChainedKernels, FolderKernels, Found, KernelKey, KernelSource, MemoryKernels, choose
from .problem import Problem
from .record import Row
from .runtime.machine import Launch, Machine
from .runtime.operands import ALIGNMENT_BYTES, DTYPES, describe, takes_out
from .settings import allow_unmeasured

# Kinds of call remembered, about 1 KiB each, and launches that are repeated at the same addresses, about 4 KiB each. A program
# that meets more of them starts afresh.
MAX_KINDS: Final = 65_536
MAX_REPEATS: Final = 4096

# What tensors without addresses or strides (sparse, nested) raise when asked for them, and an ``out`` that is no tensor.
_NO_STRIDES: Final = (NotImplementedError, RuntimeError, AttributeError)
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class AutogemmWarning(UserWarning):
    """Rows or kernels that are skipped or doubted; said once per cause and process."""


class CompilerCache:
    """Kernels that the compiler of this installation made before; asked last, and only read."""

    def find(self, key: KernelKey) -> Found:
        """Return the kernel of ``key``."""
        from .compile.compiler import cached_binary

        if key.arch not in ARCH_OF.values():
            return Found(binary=None, reason=f"no kernels are generated for {key.arch}")
        try:
            binary = cached_binary(key.config, cast(ArchName, key.arch), key.dtype)
        except AutogemmError as error:
            return Found(binary=None, reason=f"no compiled kernel for {key.config.binary.id} ({error})")
        return choose(key, [] if binary is None else [binary])


_DEFAULT_LAUNCH: Final = LaunchKnobs()
_UNPREPARED: Final = "its kernel was not loaded before the capture of the CUDA graph began; call autogemm.prepare before"


@dataclass(frozen=True, slots=True)
class _Kind:
    """What calls with tensors of one kind (sizes, strides, types, devices) do: launch ``kernel``, or torch.matmul if None.

    ``kernel`` may be an algorithm of cuBLASLt.
    """

    kernel: Launch | None
    decision: Decision
    shape: tuple[int, int] = (0, 0)
    launch: LaunchKnobs = _DEFAULT_LAUNCH
    sm_count: int = 0


@dataclass(frozen=True, slots=True)
class _Repeat:
    """A launch that may be repeated for tensors at the same addresses: a plan per stream. Changed only under the lock."""

    kernel: Launch
    plans: dict[int, Any]


class Dispatcher:
    """Rows, kernels and machine joined. Thread-safe. The functions of this module share one, see ``dispatcher``."""

    def __init__(
        self,
        *,
        read_rows: Callable[[], tuple[list[Row], list[Notice]]],
        kernels: KernelSource,
        machine: Machine,
        unmeasured: bool = False,
    ) -> None:
        """Dispatch by the rows that ``read_rows`` returns, together with what was wrong with their files.

        It is called when the first product needs rows, and after ``refresh``. ``unmeasured``: see ``decision.decide``.
        """
        self.kernels = kernels
        self.machine = machine
        self.unmeasured = unmeasured
        self._read_rows = read_rows
        self._bundled: dict[Any, Row] = {}
        self._table: Table | None = None
        self._kinds: dict[tuple[Any, ...], _Kind] = {}
        self._repeats: dict[tuple[Any, ...], _Repeat] = {}
        self._loaded: dict[tuple[KernelKey, int], Launch] = {}
        self._restored: dict[tuple[Algorithm, Problem, int], Launch] = {}
        self._lock = threading.RLock()
        self._told: set[tuple[str, str]] = set()

    def matmul(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, sm_count: int | None = None
    ) -> torch.Tensor:
        """Return ``a @ b``; see the module's ``matmul``."""
        if type(a) not in _PLAIN or type(b) not in _PLAIN or _needs_torch(self.machine.device_type):
            _check_budget(sm_count)
            return torch.matmul(a, b, out=out)
        tracked = (a.requires_grad or b.requires_grad) and torch.is_grad_enabled()
        if out is not None and not tracked:
            try:
                known = self._repeats.get(_repeat_key(a, b, out, sm_count))
            except _NO_STRIDES:
                return torch.matmul(a, b, out=out)
            if known is not None and not (out.requires_grad or a.is_neg() or b.is_neg() or out.is_neg()):
                plan = known.plans.get(known.kernel.current_stream())
                if plan is not None:
                    known.kernel.run(plan)
                    return out
        try:
            key = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device, sm_count)
        except _NO_STRIDES:
            return torch.matmul(a, b, out=out)
        kind = self._kinds.get(key) or self._kind(key, a, b, sm_count)
        kernel = kind.kernel
        if kernel is None:
            return torch.matmul(a, b, out=out)
        if tracked:
            if out is not None:
                return torch.matmul(a, b, out=out)  # raises: torch has no gradient for out=
            return cast(torch.Tensor, torch.ops.autogemm.matmul.default(a, b, sm_count=sm_count))
        if (a.data_ptr() | b.data_ptr()) % ALIGNMENT_BYTES or a.is_neg() or b.is_neg():
            return torch.matmul(a, b, out=out)
        if out is None:
            out = torch.empty(kind.shape, dtype=a.dtype, device=a.device)
        elif not takes_out(out, a, b, *kind.shape):
            return torch.matmul(a, b, out=out)
        elif self._run_and_remember(kind, kernel, a, b, out, sm_count):
            return out
        return kernel(a, b.t(), out, launch=kind.launch, sm_count=kind.sm_count)

    def explain(self, a: torch.Tensor, b: torch.Tensor, *, sm_count: int | None = None) -> Decision:
        """Return what ``matmul(a, b)`` runs and why, outside of autocast and other modes."""
        if type(a) not in _PLAIN or type(b) not in _PLAIN:
            return _no_problem(f"kernels take plain tensors, got {type(a).__name__} and {type(b).__name__}")
        if a.layout != torch.strided or b.layout != torch.strided or a.is_nested or b.is_nested:
            return _no_problem("kernels take strided tensors")
        key = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device, sm_count)
        decision = (self._kinds.get(key) or self._kind(key, a, b, sm_count)).decision
        if decision.runs != "cublas" and (a.data_ptr() | b.data_ptr()) % ALIGNMENT_BYTES:
            return decision.instead("an operand does not start at a multiple of 16 bytes, which TMA needs", decision.sm_count)
        return decision

    def decide(self, problem: Problem, index: int = 0, *, sm_count: int | None = None) -> Decision:
        """Return the decision for dense operands on GPU ``index``, loading its kernel if it is there to load."""
        return self._resolve(problem, index, sm_count, dense=True)[0]

    @property
    def table(self) -> Table:
        """The rows in use: those of loaded bundles, then those read."""
        with self._lock:
            if self._table is None:
                rows, notices = self._read_rows()
                self._tell("", notices)
                self._table = Table.of([r for r in rows if r.key not in self._bundled] + list(self._bundled.values()))
            return self._table

    def refresh(self) -> None:
        """Forget rows and decisions, so that the next product reads the rows again; loaded kernels stay loaded."""
        with self._lock:
            self._table, self._kinds, self._repeats = None, {}, {}

    def add(self, rows: Iterable[Row], binaries: Iterable[Binary]) -> None:
        """Use ``rows`` before those read, and ``binaries`` before other kernels."""
        with self._lock:
            self._bundled.update({row.key: row for row in rows})
            self.kernels = ChainedKernels([MemoryKernels(binaries), self.kernels])
            self.refresh()

    def _run_and_remember(
        self, kind: _Kind, kernel: Launch, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, sm_count: int | None
    ) -> bool:
        """Launch, and keep the launch for tensors at the same addresses; False if the kernel has no such launches."""
        stream = kernel.current_stream()
        plan = kernel.plan(a, b.t(), out, launch=kind.launch, sm_count=kind.sm_count, stream=stream)
        if plan is None:
            return False
        kernel.run(plan)
        key = _repeat_key(a, b, out, sm_count)
        with self._lock:
            if len(self._repeats) >= MAX_REPEATS:
                self._repeats = {}
            self._repeats.setdefault(key, _Repeat(kernel, {})).plans[stream] = plan
        return True

    def _kind(self, key: tuple[Any, ...], a: torch.Tensor, b: torch.Tensor, sm_count: int | None) -> _Kind:
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                kind, lasting = self._make_kind(a, b, sm_count)
                if lasting:
                    if len(self._kinds) >= MAX_KINDS:
                        self._kinds = {}
                    self._kinds[key] = kind
            return kind

    def _make_kind(self, a: torch.Tensor, b: torch.Tensor, sm_count: int | None) -> tuple[_Kind, bool]:
        """Return what calls with such tensors do, and whether later calls may rely on it."""
        _check_budget(sm_count)
        asked = describe(a, b, self.machine.device_type)
        if asked.problem is None:
            return _Kind(None, _no_problem(asked.reason)), True
        index = a.get_device()
        decision, lasting = self._resolve(asked.problem, index, sm_count, dense=asked.dense)
        if decision.runs == "cublas":
            return _Kind(None, decision), lasting
        shape = (asked.problem.m, asked.problem.n)
        if decision.algorithm is not None:
            return _Kind(self._restored[decision.algorithm, asked.problem, index], decision, shape=shape), True
        assert decision.config is not None
        kernel = self._loaded[_kernel_key(decision), index]
        return _Kind(kernel, decision, shape=shape, launch=decision.config.launch, sm_count=decision.sm_count), True

    def _resolve(self, problem: Problem, index: int, sm_count: int | None, *, dense: bool) -> tuple[Decision, bool]:
        """Return the decision that can be carried out now, its kernel or algorithm loaded, and whether it stays so."""
        with self._lock:
            device = self.machine.device(index)
            self._tell(device.gpu, screen(self.table, device))
            ask = partial(decide, problem, device, self.table, sm_count=sm_count, dense=dense, unmeasured=self.unmeasured)
            decision = ask()
            if decision.algorithm is None:
                return self._with_kernel(decision, problem, index, device)
            key = (decision.algorithm, problem, index)
            if key in self._restored:
                return decision, True
            if self.machine.capturing():
                return decision.instead(_UNPREPARED, device.sm_count), False
            try:
                self._restored[key] = self.machine.restore(*key)
            except AutogemmError as error:
                text = f"the cuBLASLt algorithm of {problem} can't be used, so its kernel or torch.matmul runs: {error}"
                self._tell(device.gpu, [Notice(cause="algorithm", text=text, rows=1, skipped=True)])
                return self._with_kernel(ask(without=str(error)), problem, index, device)
            return decision, True

    def _with_kernel(self, decision: Decision, problem: Problem, index: int, device: Device) -> tuple[Decision, bool]:
        """Return ``decision`` with its kernel loaded, or torch.matmul; and whether it stays so."""
        if decision.config is None or (_kernel_key(decision), index) in self._loaded:
            return decision, True
        if self.machine.capturing():
            return decision.instead(_UNPREPARED, device.sm_count), False
        found = self.kernels.find(_kernel_key(decision))
        if found.binary is None:
            text = f"tuned rows of {device.gpu} can't be used, so torch.matmul runs; first met at {problem}: {found.reason}"
            self._tell(device.gpu, [Notice(cause="kernel", text=text, rows=1, skipped=True)])
            return decision.instead(found.reason, device.sm_count), True
        try:
            self._loaded[_kernel_key(decision), index] = self.machine.load(found.binary, index)
        except AutogemmError as error:
            text = f"the kernel of {problem} can't be loaded, so torch.matmul runs: {error}"
            self._tell(device.gpu, [Notice(cause="load", text=text, rows=1, skipped=True)])
            return decision.instead(str(error), device.sm_count), True
        return decision, True

    def _tell(self, gpu: str, notices: Iterable[Notice]) -> None:
        for notice in notices:
            if (gpu, notice.cause) not in self._told:
                self._told.add((gpu, notice.cause))
                warnings.warn(f"autogemm: {notice.text}", AutogemmWarning, stacklevel=2)


def _kernel_key(decision: Decision) -> KernelKey:
    """Return which compiled kernel carries a decision out."""
    assert decision.problem is not None and decision.config is not None and decision.arch is not None
    row = decision.row
    return KernelKey(
        arch=decision.arch, dtype=decision.problem.dtype, layout=decision.problem.layout, epilogue=decision.problem.epilogue,
        config=decision.config.binary,
        # A measurement speaks for the kernel that was measured, a prediction for whatever the knobs make.
        generator=row.provenance.generator if row is not None and row.measurement is not None else None,
    )  # fmt: skip


def _repeat_key(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, sm_count: int | None) -> tuple[Any, ...]:
    """Return all that a launch depends on, but for the stream: two calls of one key differ in nothing that it could see."""
    return (
        a.data_ptr(), b.data_ptr(), out.data_ptr(), a.shape, b.shape, out.shape, a.stride(), b.stride(), out.stride(), a.dtype,
        b.dtype, out.dtype, a.get_device(), b.get_device(), out.get_device(), type(out), sm_count,
    )  # fmt: skip


def _no_problem(reason: str) -> Decision:
    return Decision(source="torch", problem=None, reason=reason, sm_count=0)


def _needs_torch(device_type: str) -> bool:
    """Return whether a mode is on that changes what torch.matmul does, or that must see it."""
    return (
        forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.is_autocast_enabled(device_type)
        or torch._C._get_tracing_state() is not None  # torch.jit.trace would take the product for a constant
    )  # fmt: skip


def _check_budget(sm_count: int | None) -> None:
    """Refuse an SM budget that no device could have; whether the device has as many is checked with the device."""
    if sm_count is not None and (isinstance(sm_count, bool) or not isinstance(sm_count, int) or sm_count < 1):
        raise InputError(f"sm_count must be a positive number of SMs or None, got {sm_count!r}")


def _read_named(folder: Path | str | None) -> tuple[list[Row], list[Notice]]:
    try:
        return read_database(Database(folder))
    except InputError:
        if folder is not None:
            raise
        return [], []  # a bundle's loader comes without the rows that ship with the package


def read_database(database: Database) -> tuple[list[Row], list[Notice]]:
    """Return the rows of ``database``, and a Notice for what can't be read; one bad file costs only its GPU's rows."""
    rows: list[Row] = []
    notices = []
    for gpu in sorted({path.parent.name for path in database.paths()}):
        try:
            rows += database.rows(gpu)
        except DatabaseError as error:
            notices.append(Notice(cause=f"database {gpu}", text=f"no tuned rows of {gpu}: {error}", rows=0, skipped=True))
    return rows, notices


_current: Dispatcher | None = None
_creating: Final = threading.Lock()


def dispatcher() -> Dispatcher:
    """Return the process's Dispatcher: the database that settings name, kernels of the cache and of loaded bundles."""
    if _current is None:
        use_database(None, unless_set=True)
    assert _current is not None
    return _current


def use_database(folder: Path | str | None, *, unless_set: bool = False) -> None:
    """Dispatch by the rows in ``folder`` from now on (None: those that settings name); bundles must be loaded again."""
    global _current
    with _creating:
        if not (unless_set and _current is not None):
            _current = Dispatcher(
                read_rows=lambda: _read_named(folder), machine=CudaMachine(), unmeasured=allow_unmeasured(),
                kernels=ChainedKernels([FolderKernels(), CompilerCache()]),
            )  # fmt: skip


def refresh() -> None:
    """Make matmul read the rows again before its next product; for use after they were changed, as by tuning."""
    if _current is not None:
        _current.refresh()


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, sm_count: int | None = None) -> torch.Tensor:
    """Return ``a @ b`` with the meaning, result type and errors of torch.matmul.

    A generated kernel, or the cuBLASLt algorithm that a row names, runs where a measurement supports it: ``a`` [M, K] with K
    contiguous, ``b`` [K, N] with K contiguous (the transpose of a dense [N, K]), both float16 or bfloat16, on a GPU with tuned
    rows and their compiled kernels. Anything else
    (other layouts, types, ranks, devices) is torch.matmul. Accumulates in float32. Differentiable.

    Args:
        out: tensor that receives the product, as in torch.matmul.
        sm_count: SMs to occupy at most, so that others are left to communication; torch.matmul, where it runs, ignores it.

    Raises:
        InputError: ``sm_count`` is no integer from 1 to the GPU's SM count.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced(a, b, out, sm_count)
    return (_current or dispatcher()).matmul(a, b, out, sm_count=sm_count)


def _traced(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, sm_count: int | None) -> torch.Tensor:
    """Return the product for torch.compile: the operator, whose choice is made when the compiled graph runs."""
    takes = a.dim() == 2 and b.dim() == 2 and a.dtype in DTYPES and a.dtype == b.dtype and a.device == b.device
    if not takes or torch.is_autocast_enabled(a.device.type):
        return torch.matmul(a, b, out=out)
    if out is None:
        return cast(torch.Tensor, torch.ops.autogemm.matmul.default(a, b, sm_count=sm_count))
    if out.shape != (a.shape[0], b.shape[1]) or out.dtype != a.dtype:
        return torch.matmul(a, b, out=out)
    return out.copy_(torch.ops.autogemm.matmul.default(a, b, sm_count=sm_count))


def explain(
    problem: Problem | torch.Tensor,
    b: torch.Tensor | None = None,
    *,
    device: Device | None = None,
    database: Database | None = None,
    sm_count: int | None = None,
    unmeasured: bool | None = None,
) -> Decision:
    """Return what matmul runs for ``problem`` (dense operands), or for the tensors ``problem`` and ``b``, and why.

    Args:
        device: GPU to answer for; then only rows are consulted, not whether kernels are compiled. None: the current one.
        database: rows to consult in place of those that matmul uses.
        unmeasured: overrides AUTOGEMM_UNMEASURED.

    Raises:
        InputError: neither a Problem nor two tensors, or an impossible ``sm_count``.
        DatabaseError: a file of ``database`` can't be read.
    """
    given = [part for part in (problem, b) if part is not None]
    if [isinstance(part, torch.Tensor) for part in given] != [True, True] and [type(part) for part in given] != [Problem]:
        what = ", ".join(type(part).__name__ for part in given) or "nothing"
        raise InputError(f"explain takes a Problem or two tensors, got {what}")
    if isinstance(problem, torch.Tensor):
        assert b is not None
        return dispatcher().explain(problem, b, sm_count=sm_count)
    if device is None and not torch.cuda.is_available():
        _check_budget(sm_count)
        return Decision(source="torch", problem=problem, reason="there is no CUDA GPU here", sm_count=0)
    if device is None and database is None and unmeasured is None:
        return dispatcher().decide(problem, torch.cuda.current_device(), sm_count=sm_count)
    table = dispatcher().table if database is None else Table.of(database.rows())
    target = device if device is not None else CudaMachine().device(torch.cuda.current_device())
    allowed = allow_unmeasured() if unmeasured is None else unmeasured
    return decide(problem, target, table, sm_count=sm_count, unmeasured=allowed)


def notices(device: Device, database: Database | None = None) -> tuple[Notice, ...]:
    """Return what dispatch would warn of on ``device``: rows skipped or doubted, files that can't be read."""
    rows, unread = read_database(database if database is not None else Database())
    return (*unread, *screen(Table.of(rows), device))


def prepare(problems: Iterable[Problem], *, device: int | None = None, sm_count: int | None = None) -> list[Decision]:
    """Load the kernels of ``problems`` on a GPU ahead of their first use, as before CUDA-graph capture; return the decisions.

    The cuBLASLt algorithms that rows name are restored likewise. Nothing is compiled; a kernel that is not compiled yet leaves
    its problem to torch.matmul and its decision says so.
    """
    index = device if device is not None else torch.cuda.current_device()
    return [dispatcher().decide(problem, index, sm_count=sm_count) for problem in problems]


def _operator(a: torch.Tensor, b: torch.Tensor, sm_count: int | None) -> torch.Tensor:
    if (a.requires_grad or b.requires_grad) and torch.is_grad_enabled():  # called below autograd by hand
        with torch.no_grad():
            return _operator(a, b, sm_count)
    return (_current or dispatcher()).matmul(a, b, sm_count=sm_count)


torch_ops.connect(_operator)
