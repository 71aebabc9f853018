"""Problem and shape parsing."""

import pytest
import torch

from autogemm.errors import InputError
from autogemm.problem import MAX_EXTENT, Problem, parse_shape


def test_counts_flops_and_least_bytes() -> None:
    problem = Problem(m=3, n=5, k=7, dtype="bf16")
    assert problem.dtype == "bfloat16"
    assert problem.flops == 2 * 3 * 5 * 7
    assert problem.bytes_moved == 2 * (3 * 7 + 5 * 7 + 3 * 5)


def test_takes_torch_types_for_their_names() -> None:
    assert Problem(m=1, n=8, k=8, dtype=torch.bfloat16).dtype == "bfloat16"  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown dtype"):
        Problem(m=1, n=8, k=8, dtype=torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1x2x3", " 1X2x3 ", "1*2*3"])
def test_reads_shapes(text: str) -> None:
    assert parse_shape(text) == (1, 2, 3)


@pytest.mark.parametrize(
    "text", ["4096x4096", "0x1x1", "-1x2x3", "1x2x3x4", "", "axbxc", "1.5x2x3", f"1x1x{MAX_EXTENT + 1}", "1x2x", "x1x2x3"]
)
def test_refuses_what_is_no_shape(text: str) -> None:
    with pytest.raises(InputError):
        parse_shape(text)


@pytest.mark.parametrize("extent", [0, -1, True, 1.0, "4", None, 2**31])
def test_refuses_extents_that_are_no_positive_int32(extent: object) -> None:
    for name in ("m", "n", "k"):
        with pytest.raises(InputError, match=name.upper()):
            Problem(**{"m": 1, "n": 1, "k": 1, name: extent})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["dtype", "layout", "epilogue"])
def test_refuses_unknown_kinds_by_name(field: str) -> None:
    with pytest.raises(InputError, match="'zz'.*supported"):
        Problem(m=1, n=1, k=1, **{field: "zz"})  # type: ignore[arg-type]
