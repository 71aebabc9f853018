"""Run planted faults (mutations.py) through the check."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from mutate import mutant
from mutations import CONFIGS, Mutation

import autogemm.kernel
from autogemm.binary import Binary
from autogemm.compile.toolchain import compile_cuda, usage
from autogemm.kernel.generate import generate
from autogemm.kernel.lower import cuda_text, kernel_params, quick_tracing
from autogemm.manifest import evaluate
from autogemm.results import CheckReport, Level
from autogemm.simulate.check import check_primfunc, exercising_shape, integer_inputs

_FILES = {"sm_100a": "sm100.py", "sm_90a": "sm90.py"}


def source_of(mutation: Mutation) -> str:
    """Return the text of the generator file that ``mutation`` changes."""
    return (Path(autogemm.kernel.__file__).parent / _FILES[mutation.arch_name]).read_text(encoding="utf-8")


def run(mutation: Mutation, folder: Path, *, level: Level, seeds: tuple[int, ...]) -> list[CheckReport]:
    """Return one report per seed.

    Raises:
        UnsupportedOp: the kernel uses an operation without a model; that is no verdict on the fault.
    """
    text = source_of(mutation)
    module = mutant(_FILES[mutation.arch_name], [(text, mutation.apply(text))], folder)
    config = CONFIGS[mutation.config]
    m, n, k, sms = exercising_shape(config, mutation.arch_name)
    values = {"M": m, "N": n, "K": k, "lda": k, "ldb": k, "ldd": n, "sm_count": sms}
    values |= {"l2_group_size": config.l2_group_size, "split_k": config.split_k}
    for scalar in module.manifest_parts(config.binary, "float16")[0]:
        values[scalar.name] = evaluate(scalar.value, values)
    with quick_tracing():
        func = module.build(config.binary, "float16")
    inputs = {name: bits.view(np.float16) for name, bits in integer_inputs((m, n, k), "float16").items()}
    return [
        check_primfunc(
            func, arch=mutation.arch_name, inputs=inputs, sm_count=sms, scalars=values, level=level, seeds=(seed,),
            barrier_names=module.barrier_names(config), programmatic="griddepcontrol.wait" in text,
        )
        for seed in seeds
    ]  # fmt: skip


def found(report: CheckReport) -> str:
    """Return as what a fault was found (``deadlock, race``), or an empty string."""
    return ", ".join(sorted({f.kind for f in report.findings}))


def binary(mutation: Mutation, folder: Path) -> tuple[Binary, str]:
    """Return the faulty kernel compiled, to be launched as the sound one is, and the assembler's advisory on wgmma, if any."""
    text = source_of(mutation)
    module = mutant(_FILES[mutation.arch_name], [(text, mutation.apply(text))], folder)
    config = CONFIGS[mutation.config]
    with quick_tracing():
        func = module.build(config.binary, "float16")
    cuda = cuda_text(func, mutation.arch_name)
    manifest = generate(config, mutation.arch_name).manifest
    assert [(p.kind, p.name) for p in manifest.params] == kernel_params(cuda, manifest.entry), "launched otherwise"
    code = compile_cuda(cuda, mutation.arch_name)
    advisory = re.search(r"\(C75\d\d\)[^\n]*", code.log)
    named = replace(manifest, generator=f"fault {mutation.config}: {mutation.name}")
    faulty = Binary(cubin=code.code, usage=usage(code.log), compiler=f"fault {mutation.name}", manifest=named)
    return faulty, advisory[0] if advisory else ""
