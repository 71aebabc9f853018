"""Accept a GPU host: launcher, correctness on ragged shapes, isolation of bad kernels, launch costs, graph capture, timing.

Usage: python scripts/gpu_acceptance.py KERNELS [--faults FAULTS] [--out DIR] [--skip SECTION ...]
KERNELS is a folder of compiled kernels (autogemm compile --out KERNELS), FAULTS one of kernels that misbehave on purpose
(python tests/faults.py GOOD.json FAULTS). Needs a GPU of their arch; neither TVM nor a compiler. Prints a table, writes
acceptance.json, and exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autogemm.arch import arch
from autogemm.binary import Binary, read_folder
from autogemm.errors import InputError
from autogemm.measure.bench import bench, kernel_call
from autogemm.measure.device import DeviceSession, read_bandwidth
from autogemm.measure.device_bench import DeviceBench
from autogemm.measure.environment import Recorder
from autogemm.measure.sweep import sweep
from autogemm.measure.timer import BASELINE
from autogemm.problem import Problem, parse_shape
from autogemm.runtime.driver import cuda_driver
from autogemm.runtime.launcher import Kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

RAGGED = (
    "1x4096x4096", "300x520x264", "1000x776x1032", "1752x4720x584", "4100x4104x4096", "16x104x128", "256x8x64",
    "1408x1408x384", "192x3072x256", "1000x1000x1000", "8x8x8", "64x64x8", "129x136x72",
)  # fmt: skip
TIMED = ("2048x2048x2048", "4096x4096x4096", "8192x8192x8192", "4096x2112x7168", "128x7168x2048", "16x4096x7168")
SWEPT = ("1024x1024x1024", "2048x2048x2048", "128x7168x2048", "16x4096x7168")


class Acceptance:
    """Sections that each yield lines for the table and data for the JSON file."""

    def __init__(self, kernels: list[Binary], faults: list[Binary], out: Path) -> None:
        self.kernels, self.faults, self.out = kernels, faults, out
        self.data: dict[str, Any] = {}
        self.lines: list[str] = []
        self.failed: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)
        print(text, file=sys.stderr, flush=True)

    def expect(self, true: bool, text: str) -> None:
        if not true:
            self.failed.append(text)
            self.say(f"  FAILED: {text}")

    def of(self, dtype: str) -> list[Binary]:
        return [b for b in self.kernels if b.manifest.dtype == dtype]

    def correctness(self) -> None:
        """Every kernel on ragged shapes, all group sizes drawn: exact integers equal, random within cuBLAS's error."""
        checks, worst, bad = 0, 0.0, []
        for shape in RAGGED:
            m, n, k = parse_shape(shape)
            for dtype in ("float16", "bfloat16"):
                session = DeviceSession(Problem(m=m, n=n, k=k, dtype=dtype))
                for i, binary in enumerate(self.of(dtype)):
                    for group in (8, (1, 2, 3, 5, 16, 40)[(i + checks) % 6]):
                        checks += 1
                        try:
                            launch = binary.config.launch._replace(l2_group_size=group)
                            error = session.admit(f"{binary.name}-{group}", binary, launch)
                            worst = max(worst, error["kernel"] / max(error["baseline"], 1e-9) if m * n > 4096 else 0.0)
                        except Exception as failure:
                            bad.append(f"{shape} {dtype} {binary.config.id} l{group}: {str(failure)[:160]}")
                session.close()
        self.data["correctness"] = {"checks": checks, "bad": bad, "worst_error_over_cublas": worst}
        self.say(f"correctness: {checks} checks, {len(bad)} bad, worst error {worst:.3f}x cuBLAS's")
        for text in bad[:8]:
            self.say(f"  {text}")
        self.expect(not bad, "wrong results")

    def launcher(self) -> None:
        """Reused addresses, padded rows, SM budgets, capture, streams and threads."""
        binary = next(b for b in self.of("float16") if b.config.pingpong)
        kernel = Kernel(binary)
        fewest = binary.manifest.cluster_ctas
        generator = torch.Generator("cuda").manual_seed(1)
        buffers = [torch.randint(-2, 3, (1 << 20,), generator=generator, device="cuda").half() for _ in range(3)]
        wrong = 0
        draw = torch.Generator().manual_seed(2)
        for _ in range(300):
            m, n, k, pad = (int(torch.randint(1, high, (1,), generator=draw)) for high in (65, 65, 65, 4))
            m, n, k, pad = m * 8 - 3, n * 8, k * 8, pad * 8 - 8
            a, b = buffers[0].as_strided((m, k), (k + pad, 1)), buffers[1].as_strided((n, k), (k + pad, 1))
            out = buffers[2].as_strided((m, n), (n + pad, 1))
            out.fill_(float("nan"))
            kernel(a, b, out, sm_count=int(torch.randint(fewest, 133, (1,), generator=draw)))
            wrong += not torch.equal(out, (a.float() @ b.float().T).half())
        self.expect(wrong == 0, f"{wrong} of 300 products at reused addresses are wrong")

        a, b = (torch.randint(-2, 3, (512, 512), device="cuda").half() for _ in range(2))
        expected = (a.float() @ b.float().T).half()
        out, graph = torch.zeros_like(expected), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nothing was prepared for this stream: the plan is made while capturing
            kernel(a, b, out)
        before = bool((out == 0).all())
        graph.replay()
        torch.cuda.synchronize()
        self.expect(before and torch.equal(out, expected), "a captured launch ran early or is wrong when replayed")
        side = torch.cuda.Stream()
        out.zero_()
        torch.cuda.synchronize()
        kernel(a, b, out, stream=side)
        side.synchronize()
        self.expect(torch.equal(out, expected), "wrong on another stream")
        results: list[bool] = []

        def work() -> None:
            mine = torch.zeros_like(expected)
            fresh = Kernel(binary)
            for _ in range(50):
                fresh(a, b, mine)
            torch.cuda.synchronize()
            results.append(torch.equal(mine, expected))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.expect(results == [True] * 8, f"8 threads: {results}")
        refused = 0
        for bad in ((a.float(), b, out), (a[:, 1:], b[:, 1:], out), (a.T, b, out), (a, b, a), (a.cpu(), b, out)):
            try:
                kernel(*bad)
            except InputError:
                refused += 1
        self.expect(refused == 5, f"{refused} of 5 bad inputs were refused")
        bare: list[str] = []

        def first_thing_in_a_thread() -> None:
            try:
                kernel(a, b, out)
                cuda_driver().current_stream(0)
            except Exception as error:
                bare.append(repr(error))

        thread = threading.Thread(target=first_thing_in_a_thread)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        self.expect(not bare, f"a launch as the first CUDA call of a thread: {bare}")
        self.say(f"launcher: reuse 300, capture, stream, 8 threads, {refused} refusals checked")
        clusters = {(b.manifest.cluster_ctas, b.manifest.smem_bytes): Kernel(b).resident_ctas for b in self.kernels}
        self.data["resident_ctas"] = [[*key, value] for key, value in sorted(clusters.items())]
        most = {size: max(v for (s, _), v in clusters.items() if s == size) for size, _ in sorted(clusters)}
        self.say(f"CTAs that run at once, by cluster size, of {kernel.sm_count} SMs: {most}")

    def launch_cost(self) -> None:
        """Microseconds of CPU per call on a tiny problem, where the GPU keeps up."""
        small = next(b for b in self.of("float16") if b.config.blk_m == 64)
        kernel = Kernel(small)
        a, b, out = (torch.randn(64, 64, device="cuda").half() for _ in range(3))
        others = [tuple(torch.randn(64, 64, device="cuda").half() for _ in range(3)) for _ in range(64)]
        bt = b.T
        kernel(a, b, out)
        plan = next(iter(kernel._recent.values()))

        missing, unknown = Kernel(small), Kernel(small)

        def rotate() -> None:
            others.append(others.pop(0))
            kernel(*others[0])

        def miss() -> None:
            missing._recent.clear()
            missing(a, b, out)

        def miss_all() -> None:
            unknown._recent.clear()
            unknown._recipes.clear()
            unknown(a, b, out)

        cases: dict[str, Callable[[], object]] = {
            "prepared launch alone": plan.launch, "kernel(a, b, out)": lambda: kernel(a, b, out),
            "kernel(...), 64 operand sets": rotate, "kernel(...), new addresses": miss, "kernel(...), new sizes": miss_all,
            "torch.matmul(a, b.T, out=)": lambda: torch.matmul(a, bt, out=out),
            "torch.matmul(a, b.T)": lambda: torch.matmul(a, bt),
            "torch.empty(64, 64)": lambda: torch.empty((64, 64), device="cuda", dtype=torch.float16),
        }  # fmt: skip
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(15):
            for name, call in cases.items():
                count = 50 if "new" in name else 300
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    call()
                taken[name].append((time.perf_counter() - start) / count * 1e6)
                torch.cuda.synchronize()
        self.data["launch_cost_us"] = taken
        for name, samples in taken.items():
            self.say(f"  {statistics.median(samples):7.2f} us ({min(samples):.2f} at best)  {name}")

    def isolation(self) -> None:
        """Bad kernels among good ones: classes, costs, and what the good ones take before and after."""
        from faults import outcome

        good = next(b for b in self.of("float16") if b.config.pingpong)
        rows: list[dict[str, Any]] = []
        with DeviceBench(Problem(m=2048, n=2048, k=2048), trial_timeout_s=4.0) as device:
            device.admit("good", good, good.config)
            rested, reference = _steady_rounds(device)
            usual, ratios = _ratio(reference), [r[BASELINE] / r["good"] for r in reference]
            low, high = min(*ratios, 0.99 * usual), max(*ratios, 1.01 * usual)
            self.say(
                f"  ratio before any fault {usual:.3f}, rounds from {min(ratios):.3f} to {max(ratios):.3f} "
                f"({_ratio(rested) / usual:.3f}x at once)"
            )
            rows.append({"fault": "none", "rounds_at_once": rested, "rounds": reference})
            for fault in self.faults:
                name = fault.compiler.removeprefix("fault ")
                start = time.perf_counter()
                found = device.admit(name, fault, good.config)
                first = device.round(["good", name])
                seconds = time.perf_counter() - start
                early, after = _steady_rounds(device)
                early = [first, *early]
                drift = _ratio(after) / usual
                rows.append(
                    {
                        "fault": name, "outcome": found.outcome.value, "reason": found.reason, "seconds": seconds,
                        "drift": drift, "rounds_at_once": early, "rounds": after,
                    }
                )  # fmt: skip
                self.say(
                    f"  {name:20} {found.outcome.value:20} {seconds:5.1f} s  ratio {drift:.3f}x "
                    f"({_ratio(early) / usual:.3f}x at once)  {found.reason[:90]}"
                )
                self.expect(found.outcome is outcome(name), f"{name} was classed {found.outcome.value}")
                self.expect(all("good" in r and name not in r for r in (*early, *after)), f"{name} spoiled a round")
                self.expect(low <= _ratio(after) <= high, f"after {name} the good kernel's ratio is {drift:.3f} of before")
            self.data["isolation"] = {"rows": rows, "restarts": device.restarts, "notes": device.notes}
            self.say(f"isolation: {len(rows) - 1} bad kernels, {device.restarts} restarts, notes {device.notes}")

    def timing(self) -> None:
        """Paired ratios against torch.matmul and searched cuBLASLt, cold and warm, and each shape's limit."""
        bandwidth = read_bandwidth()
        results = []
        self.say(f"timing: read bandwidth {bandwidth / 1e12:.2f} TB/s; ratios to torch.matmul warm / cold, then of cublaslt")
        for shape in TIMED:
            m, n, k = parse_shape(shape)
            kernels = self.of("float16")
            calls = {b.config.id: kernel_call(b, b.config) for b in kernels}
            control = {"control": kernel_call(kernels[0], kernels[0].config)}  # the first kernel once more
            found = bench(
                Problem(m=m, n=n, k=k), {**calls, **control}, arch_name=arch(kernels[0].manifest.arch).name,
                bandwidth_bytes_per_s=bandwidth, warm_rounds=11, cold_rounds=7,
                energy_seconds=1.0 if shape == "4096x4096x4096" else 0.0,
            )  # fmt: skip
            results.append(found.to_json())
            best = max(calls, key=lambda name: found.subjects[name].ratio())
            s, lt = found.subjects[best], found.subjects["cublaslt"]
            self.say(
                f"  {shape:17} {best:36} {s.time_s() * 1e6:8.2f} us {s.ratio():.3f} +- {s.spread():.3f} / "
                f"{s.ratio(cold=True):.3f} +- {s.spread(cold=True):.3f}; lt({found.algorithms}) {lt.ratio():.3f} / "
                f"{lt.ratio(cold=True):.3f}; limit {found.fraction_of_limit(best):.2f} {found.limit.bound}; "
                f"control {found.ratio('control', kernels[0].config.id):.4f} / "
                f"{found.ratio('control', kernels[0].config.id, cold=True):.4f}"
            )
            if s.energy_j is not None and found.baseline_energy_j is not None:
                self.say(f"    {s.energy_j:.4f} J per call, torch.matmul {found.baseline_energy_j:.4f} J")
        self.data["timing"] = results

    def sweeping(self) -> None:
        """Speed of an exhaustive sweep: seconds per candidate and shape."""
        candidates = [(b, b.config) for b in self.of("float16")]
        problems = [Problem(m=m, n=n, k=k) for m, n, k in map(parse_shape, SWEPT)]
        start = time.perf_counter()
        found = []
        with DeviceBench(problems[0]) as device:
            ready = time.perf_counter()
            found = [one.to_json() for one in sweep(problems, candidates, bench=device)]
        end = time.perf_counter()
        self.data["sweep"] = found
        each = (end - ready) / len(candidates) / len(problems)
        took = f"{end - ready:.1f} s, {each * 1e3:.1f} ms each; start {ready - start:.1f} s"
        self.say(f"sweep: {len(candidates)} kernels x {len(problems)} shapes in {took}")

    def environment(self) -> None:
        recorder = Recorder.of(0)
        recorder.sample()
        self.data["environment"] = recorder.environment().to_json()
        e = recorder.environment()
        versions = f"driver {e.driver}, CUDA {e.cuda}, torch {e.torch}"
        self.say(f"{e.gpu}, {e.sm_count} SMs, {versions}, limit {e.power_limit_w} W, {e.sm_clock_hz}")


def _steady_rounds(device: DeviceBench) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the first five rounds, and fifteen once the GPU has been under load for half a second.

    Right after a rest the ratio of two kernels can differ by a few percent from that under load; only rounds in the same state
    tell whether a fault left anything behind.
    """
    early: list[dict[str, float]] = []
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        early.append(device.round(["good"]))
    return early[:5], [device.round(["good"]) for _ in range(15)]


def _ratio(rounds: list[dict[str, float]]) -> float:
    return statistics.median(r[BASELINE] / r["good"] for r in rounds)


def main() -> int:
    """Run the sections and return 1 if anything failed."""
    sections = ("environment", "launcher", "correctness", "launch_cost", "timing", "sweeping", "isolation")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--faults", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--skip", nargs="*", default=[], choices=sections)
    given = parser.parse_args()
    faults = read_folder(given.faults) if given.faults else []
    given.out.mkdir(parents=True, exist_ok=True)
    run = Acceptance(read_folder(given.kernels), faults, given.out)
    for section in sections:
        if section in given.skip or (section == "isolation" and not faults):
            continue
        start = time.perf_counter()
        try:
            getattr(run, section)()
        except Exception:
            run.failed.append(section)
            run.say(f"  {section} broke:\n{traceback.format_exc()[-1500:]}")
        run.data.setdefault("seconds", {})[section] = time.perf_counter() - start
        run.data["failed"] = run.failed
        (given.out / "acceptance.json").write_text(json.dumps(run.data), encoding="utf-8")
    print("\n".join(run.lines))
    print("seconds per section:", {k: round(v, 1) for k, v in run.data["seconds"].items()})
    print("FAILED: " + "; ".join(run.failed) if run.failed else "all passed")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
