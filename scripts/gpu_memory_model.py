"""Break the rules of docs/memory-model.md on a GPU, one at a time, and count what goes wrong.

Usage: python scripts/gpu_memory_model.py build FOLDER        (needs TVM and NVRTC, no GPU)
       python scripts/gpu_memory_model.py run FOLDER --out FILE.json [--seconds 55] [--only TEXT ...]
``build`` compiles the small kernels of gpu_memory_model.cu, each with a rule kept and broken, and some planted faults of
tests/mutations.py with the kernels they are planted in, and asks the CPU check what it says of each fault. ``run`` needs an
sm_90a GPU, torch and cuda-bindings. Everything executes in child processes that are killed when they fall silent, so that a
hang is a result. Prints a table and writes FILE.json; scripts/memory_model_table.py puts it into the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
SILENCE_S: Final = 6.0  # a child that reports nothing for so long hangs
START_S: Final = 30.0  # but before its first line it imports torch
LAUNCHES: Final = 200
VARIANT_S: Final = 1.5  # a variant whose waits give up takes long: stop early, and say how often it ran
DATA_BYTES: Final = 128 << 20
SHAPE: Final = (2040, 2056, 1032)  # several ragged tiles per cluster; integers stay exact in float16


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One rule and the kernel that tries it.

    Attributes:
        kernel: entry point in gpu_memory_model.cu; its VARIANT 0 keeps the rule.
        subject: row of the table in docs/memory-model.md.
        broken: what VARIANT 1, 2, .. do instead.
        ctas, threads, cluster, smem_bytes: the launch.
        filled: data[i] = i beforehand, else zeros.
        before, after: kernels launched before it (it may then start while that one runs) and after it.
    """

    kernel: str
    subject: str
    broken: tuple[str, ...]
    ctas: int
    threads: int = 128
    cluster: int = 1
    smem_bytes: int = 0
    filled: bool = False
    before: str = ""
    after: str = ""


SMS: Final = 132
EXPERIMENTS: Final = (
    Experiment(
        kernel="proxy_fence_store", subject="generic write, async read or write", ctas=4 * SMS,
        broken=("no proxy fence before a bulk store", "nor a barrier between the warp's writes and its store"),
    ),
    Experiment(
        kernel="wgmma_proxy_fence", subject="generic write, async read or write", ctas=4 * SMS,
        broken=("no proxy fence before wgmma reads what threads wrote",),
    ),
    Experiment(
        kernel="ring_release", subject="generic read, async write (WAR)", ctas=2 * SMS, threads=160, smem_bytes=65536,
        filled=True,
        broken=("a stage is released before it is read", "the same, and the reader is late"),
    ),
    Experiment(
        kernel="mbarrier_phase", subject="mbarrier phase", ctas=2 * SMS, filled=True, broken=("waits for the other parity",)
    ),
    Experiment(
        kernel="mbarrier_bytes", subject="TMA transaction bytes", ctas=SMS, filled=True,
        broken=("half of the bytes are announced",),
    ),
    Experiment(
        kernel="mbarrier_init", subject="mbarrier.init", ctas=4 * SMS, threads=32, cluster=2,
        broken=("a peer arrives with no cluster barrier after the init", "the same, and the init is late"),
    ),
    Experiment(
        kernel="store_reuse", subject="bulk store groups", ctas=SMS, smem_bytes=32768,
        broken=("the stage is written again without a wait", "another thread waits"),
    ),
    Experiment(
        kernel="store_read_back", subject="bulk store groups", ctas=4 * SMS,
        broken=("D is read back after wait_group.read",),
    ),
    Experiment(
        kernel="store_exit", subject="bulk stores at exit", ctas=16 * SMS, smem_bytes=32768, after="store_exit_after",
        broken=("a CTA exits while its stores are read",),
    ),
    Experiment(
        kernel="wgmma_operands", subject="wgmma", ctas=2 * SMS, broken=("operands are overwritten before wait_group",)
    ),
    Experiment(
        kernel="wgmma_registers", subject="wgmma registers", ctas=2 * SMS,
        broken=("accumulators are read before wait_group", "no wgmma.fence (ptxas adds one: advisory C7519)"),
    ),
    Experiment(
        kernel="partial_sums", subject="workspace in global memory", ctas=4 * SMS,
        broken=("a relaxed atomic counts", "no barrier before the atomic", "neither"),
    ),
    Experiment(
        kernel="dependent_reader", subject="previous kernel", ctas=SMS, before="previous_writer",
        broken=("no griddepcontrol.wait", "another thread waits, nothing orders the readers after it"),
    ),
    Experiment(
        kernel="peer_exit", subject="exit of a CTA", ctas=16 * SMS, cluster=2, filled=True,
        broken=("a peer arrives on a barrier of a CTA that left", "a peer's multicast reaches a CTA that left"),
    ),
)  # fmt: skip

_WAIT: Final = "T.ptx.griddepcontrol.wait()"
_WAIT_AND_LAUNCH: Final = f"{_WAIT}; T.ptx.griddepcontrol.launch_dependents()"

# Planted faults (kernel, name) of tests/mutations.py that the CPU check reports, hangs last.
MUTANTS: Final = (
    ("cooperative", "no proxy fence before the TMA store"),
    ("cooperative", "no barrier between staging D and its store"),
    ("cooperative", "no barrier before D is staged again"),
    ("cooperative", "the previous store's read is not waited for"),
    ("cooperative", "the last store's read is not waited for"),
    ("cooperative", "stores are never committed"),
    ("cooperative", "another thread waits for the store's read"),
    ("cooperative", "every warp stores"),
    ("cooperative", "free stages are reported to the own CTA"),
    ("tall", "a stage is freed while its MMAs run"),
    ("tall", "the step's MMAs are not waited for at all"),
    ("tall", "the last MMAs are not waited for"),
    ("tall", "no wgmma.fence before the MMAs"),
    ("split", "sums are not waited for"),
    ("split", "one word of a sum is waited for"),
    ("split", "sums are looked at twice at most"),
    ("split", "sums are left for the next launch"),
    ("split", "counters are not cleared for the next launch"),
    ("tall", "both warpgroups load early"),
    ("cooperative", "neither fence after the barriers are set up"),
    ("ping-pong", "nothing separates barrier setup from use"),
    ("cooperative", "the cluster starts with a CTA barrier only"),
    ("split", "the previous kernel is waited for where no CTA comes"),
    ("cooperative", "one CTA of a pair waits for the previous kernel"),
    ("tall", "the previous kernel is waited for after the first loads"),
    ("cooperative", "consumers wait for the previous kernel in place of the producer"),
    ("tall", "another warp waits for the previous kernel"),
    ("ping-pong", "the previous kernel is waited for after the first tile"),
    ("cooperative", "the current stage is freed in place of the previous"),
    ("cooperative", "a CTA may leave while its peer uses it"),
)


@dataclass
class Counts:
    """Launches of one variant and what they showed."""

    launches: int = 0
    wrong_launches: int = 0
    checked: int = 0
    wrong: int = 0
    stuck: int = 0
    error: str = ""

    def add(self, checked: int, wrong: int, stuck: int = 0) -> None:
        """Count one launch."""
        self.launches += 1
        self.wrong_launches += bool(wrong or stuck)
        self.checked, self.wrong, self.stuck = self.checked + checked, self.wrong + wrong, self.stuck + stuck


# ---- build


def build(folder: Path) -> None:
    """Compile everything into ``folder``."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from dataclasses import replace

    from mutants import binary, found, run
    from mutations import CONFIGS, MUTATIONS, Mutation

    from autogemm.compile.compiler import compile_config
    from autogemm.compile.toolchain import compile_cuda, toolchain
    from autogemm.kernel.generate import generator_hash

    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.cubin"), *folder.glob("*.json")):
        old.unlink()
    text = (HERE / "gpu_memory_model.cu").read_text(encoding="utf-8")
    for variant in range(1 + max(len(e.broken) for e in EXPERIMENTS)):
        cubin = compile_cuda(f"#define VARIANT {variant}\n{text}", "sm_90a").code
        (folder / f"variant{variant}.cubin").write_bytes(cubin)
    known = {(m.config, m.name): m for m in MUTATIONS if m.arch_name == "sm_90a"}
    faults = []
    with tempfile.TemporaryDirectory() as scratch:
        for config, name in MUTANTS:
            mutation = known[(config, name)]
            broken, advisory = binary(mutation, Path(scratch))
            (report,) = run(mutation, Path(scratch), level="ptx", seeds=(0,))
            faults.append({"config": config, "name": name, "subject": mutation.subject, "found": found(report),
                           "advisory": advisory, "file": broken.write(folder).name})  # fmt: skip
            print(f"{config}: {name}: {found(report)} {advisory}", flush=True)
        good, heads = {}, {}
        for name in dict.fromkeys(config for config, _ in MUTANTS):
            kernel = compile_config(CONFIGS[name], "sm_90a")
            kernel = replace(kernel, manifest=replace(kernel.manifest, generator=f"{kernel.manifest.generator} unbroken"))
            good[name] = kernel.write(folder).name
            # The same, but it lets the next kernel start as early as there is room for it.
            early = Mutation(name="early", arch_name="sm_90a", config=name, subject="launch", old=_WAIT, new=_WAIT_AND_LAUNCH,
                             every=True)  # fmt: skip
            heads[name] = binary(early, Path(scratch))[0].write(folder).name
    meta = {"compiler": toolchain().compiler, "generator": generator_hash(), "faults": faults, "kernels": good, "heads": heads}
    (folder / "meta").write_text(json.dumps(meta, indent=1), encoding="utf-8")


# ---- children: each prints one line of JSON per item, started and done


def say(**values: Any) -> None:
    """Report to the parent."""
    print(json.dumps(values), flush=True)


def try_rules(folder: Path, items: list[str]) -> None:
    """Run experiments ``kernel/variant``."""
    from cuda.bindings import driver as cuda

    def check(result: tuple[Any, ...]) -> Any:
        if result[0] != cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(result[0].name)
        return result[1] if len(result) == 2 else result[1:]

    check(cuda.cuInit(0))
    device = check(cuda.cuDeviceGet(0))
    check(cuda.cuCtxSetCurrent(check(cuda.cuDevicePrimaryCtxRetain(device))))
    say(gpu=check(cuda.cuDeviceGetName(128, device)).split(b"\0")[0].decode(), cuda_driver=check(cuda.cuDriverGetVersion()))
    tally, data = int(check(cuda.cuMemAlloc(24))), int(check(cuda.cuMemAlloc(DATA_BYTES)))
    kinds = {e.kernel: e for e in EXPERIMENTS}
    for item in items:
        say(start=item)
        name, _, variant = item.partition("/")
        e, counts = kinds[name], Counts()
        try:
            module = check(cuda.cuModuleLoadData((folder / f"variant{variant}.cubin").read_bytes()))
            _count(cuda, check, module, e, counts, tally, data)
        except RuntimeError as error:
            counts.error = str(error)
        say(done=item, **vars(counts))
        if counts.error:
            return  # the context is lost


def _count(cuda: Any, check: Any, module: Any, e: Experiment, counts: Counts, tally: int, data: int) -> None:
    import ctypes

    from autogemm.runtime.driver import launch_config

    words = (ctypes.c_ulonglong * 3)()

    def launch(entry: str, ctas: int, arguments: tuple[int, ...], types: tuple[Any, ...], *, cluster: int = 1,
               overlap: bool = False, threads: int = 128, smem: int = 0) -> None:  # fmt: skip
        function = check(cuda.cuModuleGetFunction(module, entry.encode()))
        if smem:
            limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cuda.cuFuncSetAttribute(function, limit, smem))
        config = launch_config(cuda, ctas, threads, cluster, smem, programmatic=overlap)
        config.hStream = stream
        check(cuda.cuLaunchKernelEx(config, function, (arguments, types), 0))

    stream = check(cuda.cuStreamCreate(0))  # ordered with copies and fills, which are on the default stream
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    check(cuda.cuMemsetD8(data, 0, DATA_BYTES))
    if e.filled:
        launch("fill", 8 * SMS, (data, DATA_BYTES // 4), (pointer, number), threads=256)
    check(cuda.cuCtxSynchronize())
    stop = time.monotonic() + VARIANT_S
    types = (pointer, pointer, number)
    for round_ in range(1, LAUNCHES + 1):
        check(cuda.cuMemsetD8(tally, 0, 24))
        arguments = (tally, data, round_)
        if e.before:
            launch(e.before, e.ctas, arguments, types)
        launch(e.kernel, e.ctas, arguments, types, cluster=e.cluster, overlap=bool(e.before), threads=e.threads,
               smem=e.smem_bytes)  # fmt: skip
        if e.after:
            launch(e.after, e.ctas, arguments, types)
        check(cuda.cuCtxSynchronize())
        check(cuda.cuMemcpyDtoH(ctypes.addressof(words), tally, 24))
        counts.add(*words)
        if time.monotonic() > stop:
            return


def try_mutants(folder: Path, items: list[str]) -> None:
    """Run faults (indices into the list of meta) and unbroken kernels (names)."""
    import torch

    from autogemm.binary import Binary
    from autogemm.runtime.launcher import Kernel

    meta = json.loads((folder / "meta").read_text(encoding="utf-8"))
    m, n, k = SHAPE
    draw = torch.Generator("cuda").manual_seed(1)

    def some(rows: int, columns: int) -> Any:
        return torch.randint(-1, 2, (rows, columns), generator=draw, device="cuda").half()

    b, inputs = some(n, k), [some(m, k) for _ in range(2)]
    wanted = [(a.double() @ b.double().T).half() for a in inputs]
    # A second product that takes the first one's result: every column of it is picked once, so that it is exact too.
    picked = torch.randperm(n, generator=draw, device="cuda")
    pick = torch.zeros(n, n, device="cuda").half()
    pick[torch.arange(n, device="cuda"), picked] = 1
    between, out = (torch.empty(m, n, device="cuda").half() for _ in range(2))
    flush = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    for item in items:
        say(start=item)
        counts = Counts()
        try:
            fault = (
                meta["faults"][int(item)] if item.isdigit() else {"config": item, "subject": "", "file": meta["kernels"][item]}
            )
            kernel = Kernel(Binary.read(folder / fault["file"]))
            first = Kernel(Binary.read(folder / meta["heads"][fault["config"]]))
            chained = fault["subject"] == "launch"
            for i in range(2 * LAUNCHES if not fault["subject"] else LAUNCHES):
                a, expected = inputs[i % 2], wanted[i % 2]
                out.fill_(float("nan"))
                if i // 2 % 2:
                    flush.zero_()  # operands come from DRAM
                if chained or (not fault["subject"] and i >= LAUNCHES):
                    torch.cuda.synchronize()
                    first(a, b, between)
                    kernel(between, pick, out)
                    expected = expected[:, picked]
                else:
                    kernel(a, b, out)
                counts.add(m * n, int((out != expected).sum()))
        except Exception as error:
            counts.error = str(error).splitlines()[0][:200]
        say(done=item, **vars(counts))
        if counts.error:
            return


# ---- parent


def reports(command: list[str], items: list[str], until: float) -> Iterator[dict[str, Any]]:
    """Yield what children (``command`` and items) say; one that dies or falls silent is replaced, its item reported as such."""
    left = list(items)
    while left and time.monotonic() < until:
        with tempfile.TemporaryFile() as errors:
            child = subprocess.Popen([*command, *left], stdout=subprocess.PIPE, stderr=errors)
            current, error = "", ""
            for line in _lines(child, until):
                if isinstance(line, str):
                    error = line
                    break
                current = line.get("start", current)
                if "done" in line:
                    left.remove(line["done"])
                    current = ""
                if "start" not in line:
                    yield line
            child.kill()
            child.wait()
            errors.seek(0)
            last = "".join(errors.read().decode(errors="replace").strip().splitlines()[-1:])[:200]
        if error == "no time":
            return
        if current:
            left.remove(current)
            yield {"done": current, **vars(Counts(error=error or f"the process died: {last}"))}
        elif child.returncode not in (0, -9):
            yield {"failed": last}
            return


def _lines(child: subprocess.Popen[bytes], until: float) -> Iterator[dict[str, Any] | str]:
    """Yield a child's lines of JSON; ``hang`` once it is silent for too long, ``no time`` when that is over."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        buffered, heard, patience = b"", time.monotonic(), START_S
        while True:
            if ready.select(0.1):
                piece = os.read(child.stdout.fileno(), 65536)
                if not piece:
                    return
                heard, patience = time.monotonic(), SILENCE_S
                *lines, buffered = (buffered + piece).split(b"\n")
                for line in lines:
                    yield json.loads(line)
            if time.monotonic() > until:
                yield "no time"
                return
            if time.monotonic() - heard > patience:
                yield "hang"
                return


def run(folder: Path, out: Path, seconds: float, only: list[str]) -> None:
    """Run all there is time for; print the table and write ``out``."""
    until = time.monotonic() + seconds
    meta = json.loads((folder / "meta").read_text(encoding="utf-8"))
    document: dict[str, Any] = {
        "schema": 1, "date": time.strftime("%Y-%m-%d"), "compiler": meta["compiler"], "generator": meta["generator"],
        "shape": SHAPE, "rules": [], "faults": [],
    }  # fmt: skip

    def wanted(text: str) -> bool:
        return not only or any(part in text for part in only)

    child = [sys.executable, str(Path(__file__).resolve())]
    rules = {f"{e.kernel}/{v}": (e, v) for e in EXPERIMENTS for v in range(1 + len(e.broken)) if wanted(e.kernel)}
    lines = []
    for line in reports([*child, "rules", str(folder)], list(rules), until):
        if "done" not in line:
            document.update(line)
            continue
        e, variant = rules[line.pop("done")]
        how = e.broken[variant - 1] if variant else "kept"
        document["rules"].append({"kernel": e.kernel, "subject": e.subject, "variant": variant, "how": how, **line})
        lines.append((e.kernel, how, line))
    faults = {str(i): f for i, f in enumerate(meta["faults"]) if wanted(f["name"])}
    kernels = dict.fromkeys(f["config"] for f in faults.values())
    for line in reports([*child, "mutants", str(folder)], [*kernels, *faults], until):
        if "done" not in line:
            document.update(line)
            continue
        item = line.pop("done")
        fault = faults.get(item, {"config": item, "name": "unbroken", "subject": "", "found": ""})
        document["faults"].append({**fault, **line})
        lines.append((fault["config"], f"{fault['name']} [{fault['found']}]", line))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    for where, how, line in lines:
        print(f"{where:18} {how[:74]:74} {outcome(line)}")
    if "failed" in document:
        print(f"FAILED to start a child: {document['failed']}")
    missing = len(rules) + len(faults) + len(kernels) - len(lines)
    print(f"{len(lines)} items, {missing} without time, {seconds - (until - time.monotonic()):.1f} s")


def outcome(line: dict[str, Any]) -> str:
    """Return ``3 of 200 launches wrong`` and what else there is to say."""
    text = f"{line['wrong_launches']} of {line['launches']} launches wrong"
    if line["wrong"]:
        text += f", {line['wrong'] / line['checked']:.2%} of values"
    if line["stuck"]:
        text += f", {line['stuck']} waits gave up"
    return f"{text}; {line['error']}" if line["error"] else text


def main() -> None:
    """Build, run, or be a child."""
    mode, *rest = sys.argv[1:] or [""]
    if mode in ("rules", "mutants"):
        {"rules": try_rules, "mutants": try_mutants}[mode](Path(rest[0]), rest[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build").add_argument("folder", type=Path)
    running = commands.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--out", type=Path, default=Path("memory_model.json"))
    running.add_argument("--seconds", type=float, default=55.0)
    running.add_argument("--only", nargs="*", default=[], help="parts of names: run these only")
    given = parser.parse_args()
    if given.command == "build":
        build(given.folder)
    else:
        run(given.folder, given.out, given.seconds, given.only)


if __name__ == "__main__":
    main()
