"""Baked variants of kernels: constants in place of parameters, in the text alone."""

from __future__ import annotations

from types import ModuleType

import pytest
from fakes import make_manifest
from script_modules import load_script

from autogemm.manifest import magic_multiplier
from autogemm.problem import Problem

CUDA = """
extern "C" __global__ void __launch_bounds__(384, 1) gemm_kernel(const M a, int rows, uint rows_mul, int k_steps);
extern "C" __global__ void __launch_bounds__(384, 1) gemm_kernel(const M a, int rows, uint rows_mul, int k_steps) {
  use(a, rows, rows_mul, k_steps);
}
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("bench_baked")


def test_each_integer_parameter_becomes_a_constant_of_its_name_and_type(script: ModuleType) -> None:
    baked = script.bake(CUDA, "gemm_kernel", {"rows": 8, "rows_mul": 4294967295, "k_steps": 64})
    declaration, definition = baked.split(";\nextern")
    assert declaration == CUDA.split(";\nextern")[0]
    assert definition == (
        ' "C" __global__ void __launch_bounds__(384, 1) gemm_kernel(const M a, int unused_rows, uint unused_rows_mul, '
        "int unused_k_steps) {\n  constexpr int rows = 8u;\n  constexpr uint rows_mul = 4294967295u;\n"
        "  constexpr int k_steps = 64u;\n  use(a, rows, rows_mul, k_steps);\n}\n"
    )


def test_what_can_not_be_baked_is_an_error(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="no integer parameter a"):
        script.bake(CUDA, "gemm_kernel", {"a": 1})
    with pytest.raises(ValueError, match="no kernel other"):
        script.bake(CUDA, "other", {})


def test_constants_are_what_the_launcher_passes(script: ModuleType) -> None:
    values = script.launch_values(make_manifest(), Problem(m=300, n=264, k=136), 132)
    assert values == {"KT": 3, "g_mul": magic_multiplier(8), "tiles": 9}
