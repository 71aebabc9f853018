"""Dispatch returns what torch.matmul returns, whatever it is given; it loads each kernel once and never inside a capture."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cublaslt_fakes import algorithm_of
from dispatch_fakes import (
    CONFIG,
    H200,
    SKINNY,
    FakeMachine,
    binary_of,
    dispatcher_of,
    measured,
    operands,
    predicted,
    with_algorithm,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

import autogemm.dispatch as module
from autogemm.database import Database
from autogemm.dispatch import AutogemmWarning, Dispatcher
from autogemm.errors import InputError, LaunchError
from autogemm.kernel_store import FolderKernels, MemoryKernels
from autogemm.problem import Problem
from autogemm.record import Row


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine()


@pytest.fixture
def tuned(machine: FakeMachine) -> Dispatcher:
    rows = [measured(64, 128, 256), measured(1, 64, 32, config=SKINNY), measured(64, 128, 256, dtype="bfloat16", config=SKINNY)]
    return dispatcher_of(rows, machine=machine)


@pytest.fixture
def shared(tuned: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dispatcher]:
    """Make ``tuned`` the Dispatcher of the module's functions and of the operator."""
    monkeypatch.setattr(module, "_current", tuned)
    yield tuned


def same(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    reference = a.detach().double() @ b.detach().double()
    assert got.shape == reference.shape and got.dtype == a.dtype
    torch.testing.assert_close(got.detach().double(), reference, rtol=2e-2, atol=2e-2 * max(1.0, a.shape[-1] ** 0.5))


def test_a_tuned_shape_launches_its_kernel_with_the_rows_config(tuned: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    same(tuned.matmul(a, b), a, b)
    assert [launch["config"] for launch in machine.launches] == [CONFIG.binary]
    assert machine.launches[0]["sm_count"] == 132


def test_out_receives_the_product_and_is_returned(tuned: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    out = torch.full((64, 128), float("nan"), dtype=torch.float16)
    assert tuned.matmul(a, b, out) is out
    same(out, a, b)
    assert len(machine.launches) == 1


@pytest.fixture
def library(machine: FakeMachine) -> Dispatcher:
    """A Dispatcher whose rows name cuBLASLt algorithms: on 64 rows one faster than a good kernel, on 16 than a bad one."""
    rows = [
        with_algorithm(measured(64, 128, 256)),
        with_algorithm(measured(16, 128, 256, ratio=0.9), lead=1.2, algorithm=algorithm_of(67)),
        with_algorithm(measured(8, 128, 256), algorithm=algorithm_of(68, workspace_bytes=4096)),
    ]
    return dispatcher_of(rows, machine=machine)


def test_the_algorithm_that_a_row_names_computes_the_product(library: Dispatcher, machine: FakeMachine) -> None:
    for m, number in ((64, 66), (16, 67), (8, 68)):
        a, b = operands(m, 128, 256)
        same(library.matmul(a, b), a, b)
        out = torch.full((m, 128), float("nan"), dtype=torch.float16)
        assert library.matmul(a, b, out) is out
        same(out, a, b)
        assert [launch["algorithm"].algo_id for launch in machine.launches[-2:]] == [number] * 2
        assert library.explain(a, b).runs == "cublaslt"
    assert machine.loads == [] and len(machine.restored) == 3


def test_a_repeated_call_of_an_algorithm_follows_memory_and_stream(library: Dispatcher, machine: FakeMachine) -> None:
    for m, plans in ((64, 2), (8, 0)):  # one with workspace is never repeated
        a, b = operands(m, 128, 256)
        out = torch.empty(m, 128, dtype=torch.float16)
        before = len(machine.launches)
        for stream, seed in ((7, 1), (7, 2), (8, 3), (7, 4)):
            machine.stream = stream
            a.copy_(operands(m, 128, 256, seed=seed)[0])
            out.fill_(float("nan"))
            same(library.matmul(a, b, out), a, b)
        assert len(machine.launches) == before + 4
        assert sum(len(repeat.plans) for repeat in library._repeats.values()) == plans
        library.refresh()


def test_what_the_algorithm_was_not_measured_on_is_torchs(library: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    gaps = torch.randn(64, 512).half()[:, :256]
    odd = torch.empty(64 * 256 + 1, dtype=torch.float16)[1:].view(64, 256).copy_(a)
    for left in (gaps, odd, torch._neg_view(a)):
        torch.testing.assert_close(library.matmul(left, b), left @ b, rtol=0, atol=0)
    assert "16 bytes" in library.explain(odd, b).reason and library.explain(odd, b).runs == "cublas"
    assert machine.launches == []
    same(library.matmul(a, b, sm_count=100), a, b)  # the kernel keeps to the budget
    assert machine.launches[-1]["sm_count"] == 100


def test_an_algorithm_of_another_library_leaves_the_kernel_or_torch_with_one_notice() -> None:
    machine = FakeMachine(gpu=replace(H200, cublaslt=130200))
    rows = [with_algorithm(measured(64, 128, 256)), with_algorithm(measured(16, 128, 256, ratio=0.9), lead=1.2)]
    dispatcher = dispatcher_of(rows, machine=machine)
    with pytest.warns(AutogemmWarning, match="2 tuned rows .*130100.*130200") as caught:
        for m in (64, 16, 64):
            same(dispatcher.matmul(*operands(m, 128, 256)), *operands(m, 128, 256))
    assert len(caught) == 1 and machine.restored == []
    assert [launch["config"] for launch in machine.launches] == [CONFIG.binary] * 2


def test_an_algorithm_that_the_library_refuses_leaves_the_kernel_or_torch_with_one_notice() -> None:
    machine = FakeMachine(refuses="NOT_SUPPORTED")
    rows = [with_algorithm(measured(64, 128, 256)), with_algorithm(measured(16, 128, 256, ratio=0.9), lead=1.2)]
    dispatcher = dispatcher_of(rows, machine=machine)
    with pytest.warns(AutogemmWarning, match="NOT_SUPPORTED") as caught:
        for m in (64, 16, 64):
            same(dispatcher.matmul(*operands(m, 128, 256)), *operands(m, 128, 256))
    assert len(caught) == 1 and len(machine.launches) == 2
    assert dispatcher.explain(*operands(16, 128, 256)).runs == "cublas"
    assert "NOT_SUPPORTED" in dispatcher.explain(*operands(64, 128, 256)).reason


def test_an_algorithm_is_restored_before_a_capture_or_not_at_all(library: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    machine.is_capturing = True
    same(library.matmul(a, b), a, b)
    assert machine.restored == [] and machine.launches == []
    machine.is_capturing = False
    assert library.decide(Problem(m=64, n=128, k=256), a.get_device()).runs == "cublaslt"
    machine.is_capturing = True
    same(library.matmul(a, b), a, b)
    assert len(machine.launches) == 1


def test_eight_threads_on_one_new_shape_restore_its_algorithm_once(library: Dispatcher, machine: FakeMachine) -> None:
    _in_threads(library, [64] * 8)
    assert len(machine.restored) == 1 and len(machine.launches) == 8


def test_gradients_flow_through_an_algorithm(
    library: Dispatcher, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_current", library)
    a, b = operands(64, 128, 256)
    a.requires_grad_()
    module.matmul(a, b).sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(64, 128).half() @ b.t(), rtol=1e-2, atol=1e-2)
    assert [launch["algorithm"].algo_id for launch in machine.launches] == [66]


def test_each_type_has_its_own_row(tuned: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256, torch.bfloat16)
    same(tuned.matmul(a, b), a, b)
    assert machine.launches[0]["config"] == SKINNY.binary


def test_a_single_row_is_dense_whatever_its_stride(tuned: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(1, 64, 32)
    wide = torch.empty_strided((1, 32), (999, 1), dtype=torch.float16).copy_(a)
    same(tuned.matmul(wide, b), a, b)
    assert len(machine.launches) == 1


def test_an_sm_budget_reaches_the_launch(tuned: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    same(tuned.matmul(a, b, sm_count=100), a, b)
    assert machine.launches[0]["sm_count"] == 100


@pytest.mark.parametrize("budget", [0, -3, 133, True, 2.5, "16"])
def test_an_impossible_budget_is_one_error_each_time(tuned: Dispatcher, budget: object) -> None:
    a, b = operands(64, 128, 256)
    for _ in range(2):
        with pytest.raises(InputError, match="sm_count"):
            tuned.matmul(a, b, sm_count=budget)  # type: ignore[arg-type]


NOT_FOR_KERNELS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "row-major b": lambda: (operands(64, 128, 256)[0], torch.randn(256, 128).half()),
    "transposed a": lambda: (torch.randn(256, 64).half().t(), operands(64, 128, 256)[1]),
    "row gaps": lambda: (torch.randn(64, 512).half()[:, :256], operands(64, 128, 256)[1]),
    "misaligned": lambda: (torch.randn(64 * 256 + 1).half()[1:].view(64, 256), operands(64, 128, 256)[1]),
    "odd stride": lambda: (torch.randn(64, 257).half()[:, :256], operands(64, 128, 256)[1]),
    "overlapping rows": lambda: (torch.randn(64 * 256).half().as_strided((64, 256), (8, 1)), operands(64, 128, 256)[1]),
    "expanded": lambda: (torch.randn(1, 256).half().expand(64, 256), operands(64, 128, 256)[1]),
    "float32": lambda: (torch.randn(64, 256), torch.randn(128, 256).t()),
    "int32": lambda: (torch.ones(64, 256, dtype=torch.int32), torch.ones(128, 256, dtype=torch.int32).t()),
    "vector": lambda: (torch.randn(256).half(), operands(64, 128, 256)[1]),
    "batch": lambda: (torch.randn(2, 64, 256).half(), operands(64, 128, 256)[1]),
    "both batched": lambda: (torch.randn(2, 8, 16).half(), torch.randn(2, 16, 8).half()),
    "no rows": lambda: (torch.randn(0, 256).half(), operands(64, 128, 256)[1]),
    "no depth": lambda: (torch.randn(64, 0).half(), torch.randn(0, 128).half()),
    "odd n": lambda: (operands(64, 128, 256)[0], torch.randn(127, 256).half().t()),
    "another shape": lambda: operands(65, 128, 256),
}


@pytest.mark.parametrize("make", NOT_FOR_KERNELS.values(), ids=NOT_FOR_KERNELS.keys())
def test_what_kernels_do_not_take_is_torch_matmul(
    tuned: Dispatcher, machine: FakeMachine, make: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    a, b = make()
    torch.testing.assert_close(tuned.matmul(a, b), torch.matmul(a, b), rtol=0, atol=0)
    assert machine.launches == []
    decision = tuned.explain(a, b)
    assert decision.source == "torch" and decision.reason


def test_torchs_errors_are_torchs_own(tuned: Dispatcher) -> None:
    a, b = operands(64, 128, 256)
    for bad in ((a, a), (a, b.float()), (a, torch.randn(3)), (a, torch.tensor(1.0))):
        with pytest.raises(RuntimeError) as expected:
            torch.matmul(*bad)
        with pytest.raises(RuntimeError) as got:
            tuned.matmul(*bad)
        assert str(got.value) == str(expected.value)
    with pytest.raises(TypeError):
        tuned.matmul(a, [1.0, 2.0])  # type: ignore[arg-type]


def test_an_out_that_a_kernel_may_not_write_is_left_to_torch(tuned: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    expected = torch.matmul(a, b)
    for out in (
        torch.empty(128, 64, dtype=torch.float16).t(),
        torch.empty(64, 256, dtype=torch.float16)[:, :128],
        torch.empty(64 * 128 + 1, dtype=torch.float16)[1:].view(64, 128),
    ):
        assert tuned.matmul(a, b, out) is out
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError):
        tuned.matmul(a, b, torch.empty(64, 128))
    with pytest.raises(RuntimeError):
        tuned.matmul(a, b, torch.empty(64, 128, dtype=torch.float16, requires_grad=True).requires_grad_() + 0)
    assert machine.launches == []


def test_an_out_that_overlaps_an_operand_is_left_to_torch(machine: FakeMachine) -> None:
    dispatcher = dispatcher_of([measured(64, 64, 64)], machine=machine)
    a, b = operands(64, 64, 64)
    for out in (a, b.t()):
        with contextlib.suppress(RuntimeError):  # torch refuses some overlaps
            dispatcher.matmul(a, b, out)
    assert machine.launches == []


def test_gradients_flow_through_the_kernel(shared: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    a.requires_grad_()
    w = b.t().contiguous().requires_grad_()
    y = module.matmul(a, w.t())
    assert len(machine.launches) == 1 and y.requires_grad
    upstream = torch.randn(64, 128).half()
    y.backward(upstream)
    torch.testing.assert_close(a.grad, upstream @ w.detach(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(w.grad, upstream.t() @ a.detach(), rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        assert not module.matmul(a, w.t()).requires_grad
    assert len(machine.launches) == 2


def test_forward_mode_vmap_and_modes_see_torch_matmul(shared: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, torch.ones_like(a))
        tangent = forward_ad.unpack_dual(module.matmul(dual, b)).tangent
    torch.testing.assert_close(tangent, torch.ones_like(a) @ b)
    batch = torch.randn(3, 64, 256).half()
    torch.testing.assert_close(torch.vmap(lambda x: module.matmul(x, b))(batch), batch @ b)
    grad = torch.func.grad(lambda x: module.matmul(x, b).float().sum())(a)
    torch.testing.assert_close(grad, torch.ones(64, 128).half() @ b.t(), rtol=1e-2, atol=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.matmul(a, b).dtype == torch.bfloat16
    traced = torch.jit.trace(lambda x: module.matmul(x, b), (a,), check_trace=False)
    other, _ = operands(64, 128, 256, seed=5)
    torch.testing.assert_close(traced(other), other @ b)
    assert machine.launches == []


def test_subclasses_and_negated_views_are_torchs(tuned: Dispatcher, machine: FakeMachine) -> None:
    class Marked(torch.Tensor):
        pass

    a, b = operands(64, 128, 256)
    assert isinstance(tuned.matmul(a.as_subclass(Marked), b), Marked)
    negated = torch._neg_view(a)
    torch.testing.assert_close(tuned.matmul(negated, b), -(a @ b), rtol=1e-2, atol=1e-2)
    assert machine.launches == []
    assert "Marked" in tuned.explain(a.as_subclass(Marked), b).reason


def test_sparse_and_nested_tensors_are_torchs(tuned: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    torch.testing.assert_close(tuned.matmul(a.float().to_sparse(), b.float()), a.float() @ b.float())
    assert "strided" in tuned.explain(a.float().to_sparse(), b.float()).reason
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    weight = torch.nested.nested_tensor([torch.randn(4, 5)] * 2)
    for got, expected in zip(tuned.matmul(nested, weight).unbind(), torch.matmul(nested, weight).unbind(), strict=True):
        torch.testing.assert_close(got, expected)
    assert machine.launches == []


def test_a_repeated_call_computes_with_what_the_memory_holds_now(tuned: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    out = torch.empty(64, 128, dtype=torch.float16)
    for seed in range(3):
        a.copy_(operands(64, 128, 256, seed=seed)[0])
        same(tuned.matmul(a, b, out), a, b)
    machine.stream = 8
    out.fill_(float("nan"))
    same(tuned.matmul(a, b, out), a, b)
    assert len(machine.launches) == 4 and len(tuned._repeats) == 1


def test_an_address_that_is_used_again_never_meets_a_stale_launch(machine: FakeMachine) -> None:
    extents = (16, 32, 64)
    rows = [measured(m, n, k, dtype=d) for m in extents for n in extents for k in extents for d in ("float16", "bfloat16")]
    dispatcher = dispatcher_of(rows, machine=machine)
    draw, pool = random.Random(1), torch.zeros(4, 3 * 64 * 64, dtype=torch.float16)
    for turn in range(600):
        m, n, k = (draw.choice(extents) for _ in range(3))
        dtype = draw.choice((torch.float16, torch.bfloat16))
        at = draw.choice((0, 8, 64 * 64))
        a, b, out = (
            pool[i].view(dtype)[at : at + rows_ * cols].view(rows_, cols)
            for i, (rows_, cols) in enumerate(((m, k), (n, k), (m, n)))
        )
        generator = torch.Generator().manual_seed(turn)
        a.copy_(torch.randint(-3, 4, a.shape, generator=generator))
        b.copy_(torch.randint(-3, 4, b.shape, generator=generator))
        out.fill_(float("nan"))
        if draw.random() < 0.1:
            a = torch._neg_view(a)
        machine.stream = draw.choice((7, 8))
        expected = (a.double() @ b.double().t()).to(dtype)
        assert torch.equal(dispatcher.matmul(a, b.t(), out), expected), (turn, m, n, k, dtype)
    assert len(machine.launches) > 500 > len(dispatcher._repeats) > 50


def test_a_kernel_that_is_not_compiled_leaves_the_shape_to_torch_with_one_notice(machine: FakeMachine) -> None:
    dispatcher = dispatcher_of([measured(64, 128, 256), measured(8, 128, 256)], machine=machine, binaries=[])
    with pytest.warns(AutogemmWarning, match="no compiled kernel") as caught:
        for m in (64, 8, 64):
            a, b = operands(m, 128, 256)
            same(dispatcher.matmul(a, b), a, b)
    assert len(caught) == 1
    assert "no compiled kernel for 128x256x64" in dispatcher.explain(*operands(64, 128, 256)).reason


def test_a_kernel_of_another_generator_than_was_measured_is_not_used(machine: FakeMachine) -> None:
    row = measured(64, 128, 256)
    dispatcher = dispatcher_of([row], machine=machine, binaries=[binary_of(CONFIG, generator="gen-2")])
    with pytest.warns(AutogemmWarning, match="measured with generator gen-1, the compiled kernel is from gen-2"):
        same(dispatcher.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))
    assert machine.launches == []


def test_a_cubin_that_the_driver_refuses_leaves_the_shape_to_torch_with_one_notice() -> None:
    class Refusing(FakeMachine):
        def load(self, binary: object, index: int) -> object:
            raise LaunchError("no kernel image")

    dispatcher = dispatcher_of([measured(64, 128, 256)], machine=Refusing())
    with pytest.warns(AutogemmWarning, match="no kernel image"):
        same(dispatcher.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))


def test_rows_of_another_sm_count_give_one_loud_notice_and_torch() -> None:
    machine = FakeMachine(gpu=replace(H200, sm_count=114))
    dispatcher = dispatcher_of([measured(64, 128, 256), measured(8, 128, 256)], machine=machine)
    with pytest.warns(AutogemmWarning, match="2 tuned rows .*64x128x256.* skipped: tuned for 132 SMs") as caught:
        for m in (64, 8, 64):
            same(dispatcher.matmul(*operands(m, 128, 256)), *operands(m, 128, 256))
    assert len(caught) == 1 and machine.launches == []


def test_a_damaged_database_costs_its_own_gpu_only_and_is_said_once(tmp_path: Path, machine: FakeMachine) -> None:
    database = Database(tmp_path)
    database.put(measured(64, 128, 256))
    (tmp_path / "nvidia-b200").mkdir()
    damaged = tmp_path / "nvidia-b200" / "float16.json"
    damaged.write_bytes(b'{"schema": 1, "rows": [')
    dispatcher = Dispatcher(
        read_rows=lambda: module.read_database(Database(tmp_path)), machine=machine,
        kernels=dispatcher_of([measured(64, 128, 256)]).kernels,
    )  # fmt: skip
    with pytest.warns(AutogemmWarning, match="nvidia-b200.*damaged") as caught:
        for _ in range(2):
            same(dispatcher.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))
    assert len(caught) == 1 and len(machine.launches) == 2
    assert damaged.read_bytes() == b'{"schema": 1, "rows": ['


def test_eight_threads_on_one_new_shape_load_its_kernel_once() -> None:
    machine = FakeMachine(load_s=0.05)
    dispatcher = dispatcher_of([measured(64, 128, 256)], machine=machine)
    _in_threads(dispatcher, [64] * 8)
    assert len(machine.loads) == 1 and len(machine.launches) == 8


def test_eight_threads_on_eight_new_shapes_load_one_kernel_per_config() -> None:
    machine = FakeMachine(load_s=0.01)
    sizes = [8, 16, 24, 32, 40, 48, 56, 64]
    rows = [measured(m, 128, 256, config=CONFIG if m < 33 else SKINNY) for m in sizes]
    dispatcher = dispatcher_of(rows, machine=machine)
    _in_threads(dispatcher, sizes)
    assert len(machine.loads) == 2 and len(machine.launches) == 8


def _in_threads(dispatcher: Dispatcher, sizes: list[int]) -> None:
    barrier, failures = threading.Barrier(len(sizes)), []

    def work(m: int) -> None:
        try:
            a, b = operands(m, 128, 256)
            barrier.wait()
            same(dispatcher.matmul(a, b), a, b)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(m,)) for m in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_inside_capture_nothing_is_loaded_and_the_shape_is_served_after_it(tuned: Dispatcher, machine: FakeMachine) -> None:
    a, b = operands(64, 128, 256)
    machine.is_capturing = True
    same(tuned.matmul(a, b), a, b)
    assert machine.loads == [] and "capture" in tuned.explain(a, b).reason
    machine.is_capturing = False
    tuned.decide(Problem(m=64, n=128, k=256), a.get_device())  # what prepare() does
    machine.is_capturing = True
    same(tuned.matmul(a, b), a, b)
    assert len(machine.launches) == 1


def test_predicted_rows_run_only_if_allowed() -> None:
    for allowed in (False, True):
        machine = FakeMachine()
        dispatcher = dispatcher_of([predicted(64, 128, 256)], machine=machine, unmeasured=allowed)
        same(dispatcher.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))
        assert len(machine.launches) == int(allowed)


def test_eight_ranks_choose_the_same_whatever_they_served_before() -> None:
    near_ties = [
        measured(m, 128, 256, kernel_us=50 + m / 1000, ratio=1.2, config=CONFIG if m % 16 else SKINNY) for m in range(8, 72, 8)
    ]
    asked = [Problem(m=m, n=128, k=256) for m in (8, 12, 20, 24, 40, 60, 64, 100)]
    answers = set()
    for rank in range(8):
        rows = near_ties[rank:] + near_ties[:rank]
        dispatcher = dispatcher_of(rows, machine=FakeMachine())
        for problem in asked[rank:] if rank % 2 else ():  # this rank has served others before
            dispatcher.decide(problem, -1)
        answers.add(json.dumps([dispatcher.decide(problem, -1).to_json() for problem in asked]))
    assert len(answers) == 1
    assert {answer["source"] for answer in json.loads(answers.pop())} == {"exact", "nearest", "torch"}


def test_refresh_reads_new_rows_and_added_ones_come_first(machine: FakeMachine) -> None:
    rows: list[Row] = []
    dispatcher = Dispatcher(read_rows=lambda: (list(rows), []), kernels=MemoryKernels([binary_of(CONFIG)]), machine=machine)
    same(dispatcher.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))
    rows.append(measured(64, 128, 256))
    same(dispatcher.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))
    assert machine.launches == []
    dispatcher.refresh()
    same(dispatcher.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))
    assert machine.launches[-1]["config"] == CONFIG.binary
    dispatcher.add([measured(64, 128, 256, config=SKINNY, date="2020-01-01T00:00:00Z")], [binary_of(SKINNY)])
    same(dispatcher.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))
    assert machine.launches[-1]["config"] == SKINNY.binary
    assert len(dispatcher.table.by_key) == 1


def test_kernels_are_found_in_folders_and_damaged_ones_are_refused(tmp_path: Path, machine: FakeMachine) -> None:
    binary = binary_of(CONFIG)
    path = binary.write(tmp_path)
    source = FolderKernels([tmp_path / "missing", tmp_path])
    dispatcher = Dispatcher(read_rows=lambda: ([measured(64, 128, 256)], []), kernels=source, machine=machine)
    same(dispatcher.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))
    assert machine.loads == [binary.name]
    path.with_suffix(".cubin").write_bytes(b"something else")
    tampered = Dispatcher(read_rows=lambda: ([measured(64, 128, 256)], []), kernels=FolderKernels([tmp_path]), machine=machine)
    with pytest.warns(AutogemmWarning, match="was changed"):
        same(tampered.matmul(*operands(64, 128, 256)), *operands(64, 128, 256))
    assert len(machine.loads) == 1


def test_without_a_gpu_the_public_functions_are_torch_and_explain_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    a, b = operands(64, 128, 256)
    torch.testing.assert_close(module.matmul(a, b), a @ b, rtol=0, atol=0)
    assert "cpu" in module.explain(a, b).reason
    assert module.explain(Problem(m=64, n=128, k=256)).reason == "there is no CUDA GPU here"
    with pytest.raises(InputError):
        module.matmul(a, b, sm_count=-1)


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (("8x8x8",), "str"),
        ((None,), "nothing"),
        ((8, 8), "int, int"),
        ((torch.zeros(8, 8),), "Tensor"),
        ((Problem(m=8, n=8, k=8), torch.zeros(8, 8)), "Problem, Tensor"),
    ],
)
def test_explain_says_what_it_takes(arguments: tuple[object, ...], got: str) -> None:
    with pytest.raises(InputError, match=f"a Problem or two tensors, got {got}$"):
        module.explain(*arguments)  # type: ignore[arg-type]


def test_explain_answers_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.put(measured(64, 128, 256))
    decision = module.explain(Problem(m=64, n=128, k=256), device=H200, database=database)
    assert (decision.source, decision.config) == ("exact", CONFIG)
    assert module.explain(Problem(m=64, n=128, k=264), device=H200, database=database).source == "torch"
    assert module.notices(replace(H200, sm_count=99), database)[0].cause == "sm-count"


# Every call of this fuzz must give torch's value, or fail as torch does. Plain ones are drawn often, so that kernels run.
_EXTENTS = st.sampled_from([0, 1, 2, 7, 8, 16, 24, 33, 64])
_TUNED = (16, 24, 64)
_FUZZ_MACHINE = FakeMachine()
_FUZZED = dispatcher_of(
    [measured(m, n, k, config=CONFIG if m > 16 else SKINNY, dtype=d)
     for m in _TUNED for n in _TUNED for k in _TUNED for d in ("float16", "bfloat16")],
    machine=_FUZZ_MACHINE, unmeasured=True,
)  # fmt: skip


@st.composite
def matrices(draw: st.DrawFn, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix in one of many memory layouts: transposed, with gaps, offset, strided, expanded, negated, Parameter."""
    kind = draw(
        st.sampled_from(["dense"] * 20 + ["transposed", "gaps", "offset", "aligned", "step", "expanded", "parameter", "neg"])
    )
    seed = draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)

    if kind == "transposed":
        return values(cols, rows).t()
    if kind == "gaps":
        return values(rows, cols + draw(st.sampled_from([1, 8])))[:, :cols]
    if kind in ("offset", "aligned"):
        shift = 8 if kind == "aligned" else draw(st.integers(1, 7))
        return values(rows * cols + shift)[shift:].view(rows, cols)
    if kind == "step":
        return values(2 * rows, 2 * cols)[::2, ::2]
    if kind == "expanded":
        return values(1, cols).expand(rows, cols)
    if kind == "parameter" and dtype.is_floating_point:
        return torch.nn.Parameter(values(rows, cols), requires_grad=draw(st.booleans()))
    return torch._neg_view(values(rows, cols)) if kind == "neg" and dtype.is_floating_point else values(rows, cols)


@st.composite
def calls(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int | None]:
    extents = st.sampled_from(_TUNED) if draw(st.integers(0, 3)) else _EXTENTS
    m, n, k = (draw(extents) for _ in range(3))
    usual = st.sampled_from([torch.float16, torch.bfloat16])
    dtype = draw(usual if draw(st.integers(0, 7)) else st.sampled_from([torch.float32, torch.int32, torch.float64]))
    other = dtype if draw(st.integers(0, 9)) else draw(st.sampled_from([torch.float16, torch.float32]))
    a = draw(matrices(m, k if draw(st.integers(0, 15)) else k + 1, dtype))
    b = draw(matrices(n, k, other)).t() if draw(st.integers(0, 4)) else draw(matrices(k, n, other))
    rank = draw(st.sampled_from(["matrix"] * 8 + ["vector", "batch"]))
    if rank == "vector" and m:
        a = a[0]
    elif rank == "batch":
        a = a.expand(2, *a.shape)
    out = None
    if rank == "matrix":
        where = draw(st.sampled_from([None, None, "dense", "dense", "offset", "transposed", "operand", "type"]))
        blank = torch.full((m * n + 3,), 77, dtype=torch.float64 if where == "type" else dtype)
        if where in ("dense", "type"):
            out = blank[: m * n].view(m, n)
        elif where == "offset":
            out = blank[3:].view(m, n)
        elif where == "transposed":
            out = blank[: m * n].view(n, m).t()
        elif where == "operand" and a.shape == (m, n):
            out = a
    return a, b, out, draw(st.sampled_from([None, None, None, 132, 16, 1]))


def check(call: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int | None]) -> None:
    """Make the call; require torch's value within tolerance, or an error where torch errs."""
    a, b, out, budget = call
    plain = (a.detach().clone(), b.detach().clone())  # operands that out may overwrite
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = torch.matmul(a, b, out=None if out is None else torch.empty_like(out))
        except RuntimeError:
            with pytest.raises(RuntimeError):
                _FUZZED.matmul(a, b, out, sm_count=budget)
            return
        try:
            got = _FUZZED.matmul(a, b, out, sm_count=budget)
        except RuntimeError as error:
            assert out is a and "memory location" in str(error)
            return
    assert got.dtype == expected.dtype and got.shape == expected.shape and got.requires_grad == expected.requires_grad
    assert out is None or got is out
    if out is not a:
        reference = plain[0].double() @ plain[1].double()
        torch.testing.assert_close(got.detach().double(), reference, rtol=8e-3, atol=1e-6)


def test_any_call_gives_torchs_value_or_torchs_error() -> None:
    _fuzz(1500)


@pytest.mark.slow
def test_ten_thousand_calls_give_torchs_value_or_torchs_error() -> None:
    _fuzz(10_000)


def _fuzz(calls_made: int) -> None:
    launches = len(_FUZZ_MACHINE.launches)
    settings(max_examples=calls_made, deadline=None, derandomize=True, database=None)(given(call=calls())(check))()
    launched = len(_FUZZ_MACHINE.launches) - launches
    assert launched > calls_made // 20, f"only {launched} of {calls_made} calls reached a kernel"
