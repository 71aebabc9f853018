"""The launcher against a driver that reads parameter blocks as the real one does and computes on host memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from fakes import Disguised, FakeDriver, make_binary, make_manifest

from autogemm.config import LaunchKnobs
from autogemm.errors import InputError, LaunchError
from autogemm.manifest import magic_multiplier
from autogemm.runtime import launcher
from autogemm.runtime.launcher import Kernel


def matrices(m: int, n: int, k: int, *, seed: int = 0) -> tuple[Disguised, Disguised, Disguised]:
    a, b = integers(m, k, seed=2 * seed), integers(n, k, seed=2 * seed + 1)
    return Disguised(a), Disguised(b), Disguised(torch.full((m, n), float("nan")).half())


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return small integers in float16, whose products and sums are exact, so that results compare equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).half()


def correct(a: Disguised, b: Disguised, out: Disguised) -> bool:
    expected = (a.tensor.double() @ b.tensor.double().T).half()
    return torch.equal(out.tensor, expected)


def make_kernel(**manifest: object) -> tuple[Kernel, FakeDriver]:
    driver = FakeDriver(manifest=make_manifest(**manifest))  # type: ignore[arg-type]
    return Kernel(make_binary(**manifest), driver=driver), driver


def test_encodes_each_tensor_map_from_the_manifest() -> None:
    kernel, driver = make_kernel()
    a, b, out = matrices(300, 264, 136)
    assert kernel(a, b, out) is out
    a_map, b_map, d_map = driver.launches[0].maps
    assert (a_map.dims, a_map.strides_bytes, a_map.box) == ((136, 300), (272,), (64, 128))
    assert (b_map.dims, b_map.strides_bytes) == ((136, 264), (272,))
    assert driver.launches[0].addresses == [a.data_ptr(), b.data_ptr(), out.data_ptr()]
    assert (d_map.dims, d_map.strides_bytes, d_map.box) == ((264, 300), (528,), (64, 64))
    assert a_map.dtype == "float16" and a_map.swizzle_bytes == 128 and a_map.l2_promotion_bytes == 128
    assert correct(a, b, out)


def test_passes_scalars_in_the_order_of_the_manifest() -> None:
    kernel, driver = make_kernel()
    kernel(*matrices(300, 264, 136), launch=LaunchKnobs(l2_group_size=5))
    assert driver.launches[0].scalars == [3, magic_multiplier(5), 9]


def test_uses_the_binarys_own_group_size_unless_told() -> None:
    kernel, driver = make_kernel()
    kernel(*matrices(128, 128, 64))
    assert driver.launches[0].scalars[1] == magic_multiplier(8)


def test_launches_the_grid_cluster_and_shared_memory_of_the_manifest_on_the_current_stream() -> None:
    kernel, driver = make_kernel(cluster=2)
    kernel(*matrices(640, 512, 64))
    spec = driver.launches[0].spec
    assert (spec.grid_ctas, spec.cluster_ctas, spec.block_threads, spec.smem_bytes) == (40, 2, 384, 200_000)
    assert spec.stream == 7


def test_sm_count_limits_the_grid() -> None:
    kernel, driver = make_kernel()
    kernel(*matrices(1280, 1280, 64), sm_count=20)
    assert driver.launches[0].spec.grid_ctas == 20
    with pytest.raises(InputError, match="takes 1 to 132"):
        kernel(*matrices(128, 128, 64), sm_count=133)
    with pytest.raises(InputError, match="takes 1 to 132"):
        kernel(*matrices(128, 128, 64), sm_count=0)


def make_clustered(cluster: int, active: int) -> tuple[Kernel, FakeDriver]:
    driver = FakeDriver(manifest=make_manifest(cluster=cluster), active_clusters=active)
    return Kernel(make_binary(cluster=cluster), driver=driver), driver


def test_a_grid_of_clusters_holds_no_more_than_the_device_runs_at_once() -> None:
    kernel, driver = make_clustered(cluster=4, active=30)  # of 132 SMs, where 33 would be asked for
    large, small = matrices(1280, 1280, 64), matrices(128, 640, 64)
    kernel(*large)
    kernel(*large, sm_count=132)
    kernel(*large, sm_count=64)
    kernel(*small)
    assert [launch.spec.grid_ctas for launch in driver.launches] == [120, 120, 64, 20]
    assert kernel.sm_count == 132 and kernel.resident_ctas == 120
    assert correct(*large) and correct(*small)


def test_clusters_are_counted_once_per_loaded_binary_and_only_where_there_are_any() -> None:
    kernel, driver = make_clustered(cluster=2, active=66)
    Kernel(kernel.binary, driver=driver)
    for size in (128, 256):
        kernel(*matrices(size, 128, 64))
    assert driver.asked_clusters == [(1001, 384, 2, 200_000)] and kernel.resident_ctas == 132
    single, driver = make_kernel()
    single(*matrices(128, 128, 64))
    assert not driver.asked_clusters and single.resident_ctas == 132


def test_refuses_clusters_that_the_device_can_not_hold() -> None:
    with pytest.raises(LaunchError, match=r"can't hold a cluster of 4 CTAs with 200000 bytes .* smaller clusters"):
        make_clustered(cluster=4, active=0)


def test_repeated_calls_reuse_the_prepared_launch() -> None:
    kernel, driver = make_kernel()
    a, b, out = matrices(128, 128, 64)
    for _ in range(5):
        kernel(a, b, out)
    assert len(driver.encoded) == 3 and len(driver.prepared) == 1 and len(driver.launches) == 5


def test_reads_and_writes_padded_rows() -> None:
    kernel, driver = make_kernel()
    wide = integers(96, 208)
    a, b = Disguised(wide[:, :100]), Disguised(integers(72, 104)[:, :100])
    whole = torch.zeros(96, 80).half()
    out = Disguised(whole[:, :72])
    kernel(a, b, out)
    assert driver.launches[0].maps[0].strides_bytes == (416,) and driver.launches[0].maps[2].strides_bytes == (160,)
    assert correct(a, b, out) and not whole[:, 72:].any()


def test_never_uses_a_tensor_map_of_other_tensors_at_the_same_address() -> None:
    """Every shape and stride that fits is laid over the same three buffers, in an order in which each follows each other."""
    kernel, driver = make_kernel()
    buffers = [integers(64 * 64, seed=i) for i in range(3)]
    sizes = [(8, 16, 24), (24, 16, 8), (16, 8, 24), (8, 24, 16), (1, 8, 8), (8, 8, 8)]
    variants = [(m, n, k, pad) for m, n, k in sizes for pad in (0, 8, 16)]
    order = [v for i in range(len(variants)) for v in (variants[i], *variants)]
    for m, n, k, pad in order:
        a = Disguised(buffers[0].as_strided((m, k), (k + pad, 1)))
        b = Disguised(buffers[1].as_strided((n, k), (k + pad, 1)))
        out = Disguised(buffers[2].as_strided((m, n), (n + pad, 1)))
        buffers[2].fill_(float("nan"))
        kernel(a, b, out)
        assert correct(a, b, out), (m, n, k, pad)
    assert len(driver.prepared) == len(variants)


def test_sizes_evaluated_for_other_addresses_serve_new_ones() -> None:
    kernel, driver = make_kernel()
    drawn = [matrices(300, 264, 136, seed=seed) for seed in range(3)]
    for tensors in drawn:
        kernel(*tensors)
        assert correct(*tensors)
    assert len(driver.prepared) == 3 and len(kernel._recipes) == 1
    kernel(*matrices(300, 264, 136), launch=LaunchKnobs(l2_group_size=3))
    assert len(kernel._recipes) == 2


def test_every_launch_knob_is_part_of_the_key() -> None:
    kernel, driver = make_kernel()
    tensors = matrices(640, 640, 64)
    for group in (None, 1, 2, 8):
        for sms in (None, 2, 8):
            for stream in (None, 3, 4):
                launch = None if group is None else LaunchKnobs(l2_group_size=group)
                kernel(*tensors, launch=launch, sm_count=sms, stream=stream)
                last = driver.launches[-1]
                assert last.scalars[1] == magic_multiplier(group or 8)
                assert last.spec.grid_ctas == min(sms or 132, 25) and last.spec.stream == (stream or 7)


def test_follows_the_current_stream() -> None:
    kernel, driver = make_kernel()
    tensors = matrices(128, 128, 64)
    for stream in (7, 9, 7):
        driver.stream = stream
        kernel(*tensors)
        assert driver.launches[-1].spec.stream == stream
    assert len(driver.prepared) == 2


def test_the_plan_cache_is_bounded_and_keeps_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "PLANS", 8)
    kernel, driver = make_kernel()
    hot = matrices(128, 128, 64)
    kernel(*hot)
    cold = [matrices(8, 8, 8, seed=i) for i in range(40)]
    for tensors in cold:
        kernel(*tensors)
        kernel(*hot)
        assert len(kernel._recent) + len(kernel._old) <= 8
    assert len(driver.prepared) == 41


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b, o: (Disguised(a.tensor.float()), b, o), "a is float32; this kernel computes float16"),
        (lambda a, b, o: (a, Disguised(b.tensor.bfloat16()), o), "b is bfloat16"),
        (lambda a, b, o: (Disguised(a.tensor, "cuda:1"), b, o), "a is on cuda:1; this kernel is loaded on cuda:0"),
        (lambda a, b, o: (a, b, o.tensor), "out is on cpu"),
        (lambda a, b, o: (a, Disguised(b.tensor[:, :56]), o), r"both need the same K"),
        (lambda a, b, o: (a, b, Disguised(o.tensor[:64])), r"out is \[64, 128\]; .* give \[128, 128\]"),
        (lambda a, b, o: (Disguised(a.tensor[None]), b, o), "a has 3 dimensions"),
        (lambda a, b, o: (Disguised(integers(64, 128).T), b, o), "last dimension must be contiguous"),
        (lambda a, b, o: (Disguised(integers(128, 72)[:, 1:65]), b, o), "2 past a multiple of 16"),
        (lambda a, b, o: (Disguised(integers(128, 68)[:, :64]), b, o), "rows of 68 elements, 136 bytes"),
        (lambda a, b, o: (Disguised(integers(1, 64).expand(128, 64)), b, o), "its rows overlap"),
        (lambda a, b, o: (Disguised(a.tensor[:0]), b, Disguised(o.tensor[:0])), "M is 0"),
        (lambda a, b, o: (Disguised(a.tensor[:, :0]), Disguised(b.tensor[:, :0]), o), "K is 0"),
        (lambda a, b, o: (a, b, "out"), "three torch tensors"),
    ],
)
def test_refuses_tensors_it_can_not_take(change, message) -> None:  # type: ignore[no-untyped-def]
    kernel, driver = make_kernel()
    with pytest.raises(InputError, match=message):
        kernel(*change(*matrices(128, 128, 64)))
    assert not driver.launches


def test_refuses_an_output_that_overlaps_an_input() -> None:
    kernel, _ = make_kernel()
    storage = integers(128, 128)
    b = Disguised(integers(64, 64))
    with pytest.raises(InputError, match="out overlaps a"):
        kernel(Disguised(storage[:, :64]), b, Disguised(storage[:, 32:96]))


def test_takes_column_slices_of_one_buffer() -> None:
    kernel, _ = make_kernel()
    storage = integers(128, 128)
    a, b, out = Disguised(storage[:, :64]), Disguised(integers(64, 64)), Disguised(storage[:, 64:])
    kernel(a, b, out)
    assert correct(a, b, out)


@pytest.mark.parametrize("group", [0, -1, 65, True])
def test_refuses_group_sizes_out_of_range(group: int) -> None:
    kernel, _ = make_kernel()
    with pytest.raises(InputError, match="1 to 64"):
        kernel(*matrices(128, 128, 64), launch=LaunchKnobs(l2_group_size=group))


def test_refuses_slices_of_a_kernel_that_does_not_split() -> None:
    kernel, _ = make_kernel()
    with pytest.raises(InputError, match="SPLIT_K=2; use 1: this kernel can't split"):
        kernel(*matrices(128, 128, 64), launch=LaunchKnobs(split_k=2))


def test_a_single_row_may_have_any_row_stride() -> None:
    kernel, driver = make_kernel()
    a = Disguised(integers(104).as_strided((1, 100), (3, 1)))
    b, out = Disguised(integers(72, 104)[:, :100]), Disguised(torch.zeros(1, 72).half())
    kernel(a, b, out)
    assert driver.launches[0].maps[0].strides_bytes == (208,)
    assert correct(a, b, out)


def test_refuses_a_gpu_of_another_arch() -> None:
    driver = FakeDriver(arch=(10, 0))
    with pytest.raises(LaunchError, match=r"for sm_90a; device 0 \(NVIDIA Fake\) has compute capability 10\.0"):
        Kernel(make_binary(), driver=driver)


def test_loads_a_binary_once_per_device_from_many_threads() -> None:
    driver = FakeDriver()
    binary = make_binary(b"shared")
    start = threading.Barrier(8)
    wrong = []

    def work(i: int) -> None:
        start.wait()
        tensors = matrices(128, 128, 64, seed=i % 2)
        kernel = Kernel(binary, driver=driver)
        for _ in range(20):
            kernel(*tensors)
        if not correct(*tensors):
            wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(driver.loads) == 1 and len(driver.launches) == 160
    Kernel(binary, device=1, driver=driver)
    Kernel(replace(binary, cubin=b"other"), driver=driver)
    assert [device for device, _ in driver.loads] == [0, 1, 0]


def test_one_kernel_serves_many_threads_at_once() -> None:
    kernel, driver = make_kernel()
    start = threading.Barrier(8)
    wrong = []

    def work(i: int) -> None:
        start.wait()
        for j in range(30):
            tensors = matrices(8 + 8 * i, 16, 8 * (1 + j % 3), seed=j)
            kernel(*tensors)
            if not correct(*tensors):
                wrong.append((i, j))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len({launch.thread for launch in driver.launches}) == 8


def test_makes_its_devices_context_current_and_restores_the_callers() -> None:
    binary, driver = make_binary(), FakeDriver()
    kernel = Kernel(binary, device=1, driver=driver)
    driver.contexts.current = 0
    tensors = [Disguised(t.tensor, "cuda:1") for t in matrices(128, 128, 64)]
    kernel(*tensors)
    assert driver.launches[0].context == 1 and driver.contexts.current == 0


def test_workspace_is_zeroed_once_and_shared_by_equal_sizes_on_one_stream() -> None:
    kernel, driver = make_kernel(workspace="tiles * 64 + 4096")
    first, second = matrices(256, 128, 64), matrices(256, 128, 64, seed=1)
    for tensors in (first, second, first):
        kernel(*tensors)
        assert correct(*tensors)
    assert driver.allocations == [(4224, 7, False)]
    assert len({launch.scalars[3] for launch in driver.launches}) == 1


def test_workspace_is_not_shared_between_streams_or_sizes_or_captures() -> None:
    kernel, driver = make_kernel(workspace="tiles * 64 + 4096")
    small, large = matrices(256, 128, 64), matrices(512, 128, 64)
    kernel(*small)
    kernel(*large)
    kernel(*small, stream=9)
    for driver.capture in (1, 2, 2):
        kernel(*small)
    driver.capture = 0
    kernel(*small)
    used = [launch.scalars[3] for launch in driver.launches]
    assert len(set(used)) == 5 and used[4] == used[5] and used[6] == used[0]
    assert [capturing for _, _, capturing in driver.allocations] == [False, False, False, True, True]


def test_workspace_of_a_capture_outlives_the_plan_and_the_kernel() -> None:
    kernel, driver = make_kernel(workspace="4096")
    driver.capture = 5
    kernel(*matrices(128, 128, 64))
    loaded = kernel._loaded
    kernel._recent.clear()
    del kernel
    assert len(loaded.captured) == 1


def test_refuses_scalars_beyond_32_bits() -> None:
    binary = make_binary()
    manifest = replace(
        binary.manifest, scalars=(replace(binary.manifest.scalars[0], value="K * 100000000"), *binary.manifest.scalars[1:])
    )
    kernel = Kernel(replace(binary, manifest=manifest), driver=FakeDriver(manifest=manifest))
    with pytest.raises(InputError, match=r"KT=6400000000 does not fit in 32 bits"):
        kernel(*matrices(128, 128, 64))


def test_a_plan_runs_again_on_what_the_memory_holds_and_never_with_workspace() -> None:
    kernel, driver = make_kernel()
    a, b, out = matrices(64, 64, 64)
    launch = LaunchKnobs(l2_group_size=4)
    plan = kernel.plan(a, b, out, launch=launch, sm_count=100, stream=kernel.current_stream())  # type: ignore[arg-type]
    assert plan is not None
    for seed in range(2):
        a.tensor.copy_(integers(64, 64, seed=seed))
        kernel.run(plan)
        assert correct(a, b, out)
    assert len(driver.prepared) == 1 and [launch.scalars[1] for launch in driver.launches] == [magic_multiplier(4)] * 2
    kernel, _ = make_kernel(workspace="M * N * 4")
    assert kernel.plan(a, b, out, launch=launch, sm_count=100, stream=7) is None  # type: ignore[arg-type]
