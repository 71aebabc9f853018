"""A cuBLASLt algorithm is found, written down, restored from its bytes, and computes the product with nothing else at hand."""

from __future__ import annotations

import ctypes
import json
import threading
from dataclasses import asdict, replace

import pytest
import torch
from cublaslt_fakes import VERSION, algorithm_of, fake_cublaslt
from fakes import Disguised

from autogemm.algorithm import Algorithm
from autogemm.decoding import decode
from autogemm.errors import InputError, LaunchError, MissingDependency
from autogemm.measure.cublaslt import WORKSPACE_BYTES, offered
from autogemm.problem import Problem
from autogemm.runtime import cublaslt as module

PROBLEM = Problem(m=48, n=64, k=32)


def matrices(problem: Problem = PROBLEM, seed: int = 0) -> tuple[Disguised, Disguised, Disguised]:
    """Return integers in a [M,K] and b [N,K], whose products and sums are exact, and an output full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-2, 3, (rows, problem.k), generator=generator).half() for rows in (problem.m, problem.n))
    return Disguised(a), Disguised(b), Disguised(torch.full((problem.m, problem.n), float("nan")).half())


def correct(a: Disguised, b: Disguised, out: Disguised) -> bool:
    return torch.equal(out.tensor, (a.tensor.double() @ b.tensor.double().T).half())


def test_an_algorithm_survives_json_and_computes_the_product_when_restored() -> None:
    lt, library = fake_cublaslt(offers=[algorithm_of(7), algorithm_of(9, split_k=4, workspace_bytes=4096)])
    kept = [decode(Algorithm, json.loads(json.dumps(asdict(one))), "algorithm") for one in offered(lt, PROBLEM)]
    assert kept == library.offers
    elsewhere, other = fake_cublaslt()
    for algorithm in kept:
        a, b, out = matrices()
        assert elsewhere.restore(algorithm, PROBLEM)(a, b, out) is out
        assert correct(a, b, out)
    assert [call["algo_id"] for call in other.calls] == [7, 9]


def test_the_call_gets_the_tensors_addresses_the_current_stream_and_workspace_of_its_size() -> None:
    lt, library = fake_cublaslt()
    lt.driver.stream = 77
    a, b, out = matrices()
    lt.restore(algorithm_of(3), PROBLEM)(a, b, out)
    lt.restore(algorithm_of(4, workspace_bytes=4096), PROBLEM)(a, b, out)
    without, with_ = library.calls
    for call in library.calls:
        assert (call["a"], call["b"], call["d"], call["stream"]) == (a.data_ptr(), b.data_ptr(), out.data_ptr(), 77)
    assert (without["workspace"], without["size"]) == (0, 0)
    assert with_["workspace"] != 0 and with_["size"] == 4096


def test_a_plan_is_repeated_on_what_the_memory_holds_and_there_is_none_with_workspace() -> None:
    lt, library = fake_cublaslt()
    a, b, out = matrices()
    algorithm = lt.restore(algorithm_of(), PROBLEM)
    plan = algorithm.plan(a, b, out, stream=5)
    assert plan is not None
    for seed in range(3):
        a.tensor.copy_(matrices(seed=seed)[0].tensor)
        algorithm.run(plan)
        assert correct(a, b, out)
    assert [call["stream"] for call in library.calls] == [5, 5, 5]
    # Its memory would be shared by graphs that are replayed at once.
    assert lt.restore(algorithm_of(workspace_bytes=1), PROBLEM).plan(a, b, out, stream=5) is None


def test_threads_without_a_context_and_calls_under_another_current_device_get_the_devices_context() -> None:
    lt, library = fake_cublaslt()
    algorithm = lt.restore(algorithm_of(), PROBLEM)
    results: list[bool] = []

    def work(seed: int) -> None:
        a, b, out = matrices(seed=seed)
        for _ in range(5):
            algorithm(a, b, out)
        results.append(correct(a, b, out))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8 and len(library.calls) == 40
    lt.driver.device = 1
    a, b, out = matrices()
    algorithm(a, b, out)
    assert correct(a, b, out)


def test_descriptors_are_made_once_per_problem() -> None:
    lt, library = fake_cublaslt()
    for number in range(4):
        lt.restore(algorithm_of(number + 1), PROBLEM)
    assert sum(one["what"] == "operation" for one in library.objects.values()) == 1
    lt.restore(algorithm_of(), replace(PROBLEM, m=56))
    assert sum(one["what"] == "operation" for one in library.objects.values()) == 2


def test_an_algorithm_of_another_version_with_other_bytes_or_that_is_refused_is_not_restored() -> None:
    lt, library = fake_cublaslt()
    with pytest.raises(LaunchError, match=f"of cuBLASLt 120000, the library here is {VERSION}"):
        lt.restore(algorithm_of(version=120000), PROBLEM)
    with pytest.raises(LaunchError, match="bytes .* say lt66_t393"):
        lt.restore(replace(algorithm_of(), tile_id=20), PROBLEM)
    library.needs_bytes = 4096
    with pytest.raises(LaunchError, match="wants 4096 bytes of workspace .* measured with 64"):
        lt.restore(algorithm_of(workspace_bytes=64), PROBLEM)
    library.refuses = {"check"}
    with pytest.raises(LaunchError, match="NOT_SUPPORTED"):
        lt.restore(algorithm_of(), PROBLEM)


def test_a_refused_call_and_tensors_of_another_problem_are_errors() -> None:
    lt, library = fake_cublaslt()
    algorithm = lt.restore(algorithm_of(), PROBLEM)
    a, b, out = matrices()
    wide = Disguised(torch.zeros(48, 64).half()[:, :32])
    offset = Disguised(torch.zeros(48 * 32 + 1).half()[1:].view(48, 32))
    other = matrices(Problem(m=40, n=64, k=32))[0]
    for bad in (wide, offset, other, Disguised(a.tensor.float()), Disguised(a.tensor, "cuda:1")):
        with pytest.raises(InputError, match="48x32, 64x32, 48x64"):
            algorithm(bad, b, out)
    assert library.calls == []
    library.refuses = {"matmul"}
    with pytest.raises(LaunchError, match="could not run algorithm lt66"):
        algorithm(a, b, out)


def test_a_search_bounds_workspace_alignment_and_reductions_and_cleans_up() -> None:
    lt, library = fake_cublaslt(offers=[algorithm_of(1, workspace_bytes=WORKSPACE_BYTES + 1), algorithm_of(2)])
    assert [one.algo_id for one in offered(lt, PROBLEM)] == [2]
    (asked,) = (one for one in library.objects.values() if one["what"] == "preference")
    assert {name: asked[name] for name in "135678"} == {
        "1": WORKSPACE_BYTES, "3": 2, "5": 16, "6": 16, "7": 16, "8": 16
    }  # fmt: skip
    library.offers = []
    with pytest.raises(LaunchError, match="could not find an algorithm for 48x64x32"):
        offered(lt, PROBLEM)
    assert library.alive == 0


@pytest.mark.parametrize(
    "damage",
    [{"data": "00" * 63}, {"data": "zz" * 64}, {"data": "AB" * 64}, {"workspace_bytes": -1}, {"workspace_bytes": 1 << 40},
     {"version": 0}],
)  # fmt: skip
def test_what_is_no_algorithm_is_one_clear_error(damage: dict[str, object]) -> None:
    with pytest.raises(InputError, match="tune the shape again|a positive number"):
        decode(Algorithm, {**asdict(algorithm_of()), **damage}, "algorithm")


def test_other_layouts_than_nt_are_refused() -> None:
    lt, _ = fake_cublaslt()
    with pytest.raises(InputError, match="layout NT"):
        lt.product(replace(PROBLEM, layout="NN"))


def test_structures_have_the_sizes_of_the_header() -> None:
    # cublasLtMatmulHeuristicResult_t: 64 bytes, size_t, int, float, int[4]
    assert ctypes.sizeof(module.Heuristic) == 64 + 8 + 4 + 4 + 16


def test_without_a_cuda_build_of_torch_there_is_no_library_and_its_version_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    module.library.cache_clear()
    with pytest.raises(MissingDependency, match="libcublasLt"):
        module.library()
    assert module.library_version() == 0
