"""Manifest expressions, magic division and the binary files."""

import json
import random
from pathlib import Path

import pytest

from autogemm.binary import Binary, Usage, read_folder
from autogemm.config import NAMED
from autogemm.errors import InputError
from autogemm.manifest import Manifest, Param, Scalar, TensorMap, evaluate, magic_multiplier, magic_shift


def test_magic_division_is_exact_over_all_dividends_that_can_occur() -> None:
    rng = random.Random(0)
    divisors = [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        13,
        64,
        100,
        127,
        128,
        129,
        641,
        2**15 - 1,
        2**16,
        2**16 + 1,
        2**30,
        2**31 - 1,
    ]
    divisors += [rng.randrange(1, 2**31) for _ in range(300)]
    for d in divisors:
        mul, shift = magic_multiplier(d), magic_shift(d)
        assert 0 <= mul < 2**32
        edges = {0, 1, d - 1, d, d + 1, 2 * d - 1, 2 * d, 2**31 - 1, (2**31 - 1) // d * d, (2**31 - 1) // d * d - 1}
        for n in edges | {rng.randrange(2**31) for _ in range(50)}:
            if 0 <= n < 2**31:
                assert n // d == (n if mul == 0 else ((n * mul) >> 32) >> shift), (n, d)


def test_evaluates_integer_arithmetic() -> None:
    values = {"M": 100, "N": 7, "K": 64}
    assert evaluate("ceildiv(M, N) * K - M % N + (1 if M > N else 0)", values) == 15 * 64 - 2 + 1
    assert evaluate("min(M, round_up(N, 8)) + max(M, K)", values) == 8 + 100


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "M.bit_length()", "open('x')", "[M]", "M / N", "M ** N", "'a'", "1.5", "lambda: 1", "M if",
     "(lambda: M)()",
     "missing", "True"],
)  # fmt: skip
def test_refuses_anything_else(expression: str) -> None:
    with pytest.raises(InputError):
        evaluate(expression, {"M": 1, "N": 1})


def manifest() -> Manifest:
    return Manifest(
        entry="gemm_kernel", arch="sm_90a", dtype="float16", layout="NT", epilogue="none",
        knobs=NAMED["sm_90a"]["cooperative"].binary.to_knobs(), block_threads=384, cluster_ctas=2, smem_bytes=1000,
        grid="grid", scalars=(Scalar(name="tiles", value="ceildiv(M, 128)"), Scalar(name="grid", value="min(tiles, sm_count)")),
        tensor_maps=(TensorMap(name="A", operand="a", dims=("K", "M"), strides_bytes=("lda * 2",), box=("64", "128"),
                               swizzle_bytes=128),),
        params=(Param(kind="tensor_map", name="A"), Param(kind="int32", name="grid")),
    )  # fmt: skip


def test_scalars_build_on_one_another() -> None:
    values = manifest().scalar_values({"M": 1000, "sm_count": 6})
    assert (values["tiles"], values["grid"]) == (8, 6)


def test_round_trips_through_json() -> None:
    assert Manifest.from_json(json.loads(json.dumps(manifest().to_json()))) == manifest()


@pytest.mark.parametrize("document", [None, [], {}, {"schema": 1}, {"schema": "1"}, {"schema": 1, "scalars": 3}])
def test_refuses_what_is_no_manifest(document: object) -> None:
    with pytest.raises(InputError):
        Manifest.from_json(document)


def test_refuses_a_newer_schema_by_number() -> None:
    with pytest.raises(InputError, match="newer"):
        Manifest.from_json({**manifest().to_json(), "schema": 99})


def binary(cubin: bytes = b"\x7fELF cubin") -> Binary:
    usage = Usage(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    return Binary(cubin=cubin, manifest=manifest(), usage=usage, compiler="nvrtc 13.0")


def test_binaries_round_trip_through_a_folder(tmp_path: Path) -> None:
    binary().write(tmp_path)
    binary(b"other").write(tmp_path)
    assert sorted(b.cubin for b in read_folder(tmp_path)) == [b"other", b"\x7fELF cubin"]
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".cubin", ".cubin", ".json", ".json"]


@pytest.mark.parametrize("part", ["cubin", "json"])
def test_a_tampered_binary_is_refused(tmp_path: Path, part: str) -> None:
    path = binary().write(tmp_path)
    if part == "cubin":
        path.with_suffix(".cubin").write_bytes(b"\x7fELF cubim")
    else:
        path.write_text(path.read_text().replace('"smem_bytes": 1000', '"smem_bytes": 1001'))
    with pytest.raises(InputError, match="changed"):
        Binary.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": 2}', '{"schema": 1, "manifest": {}}'])
def test_broken_descriptions_are_refused(tmp_path: Path, text: str) -> None:
    path = binary().write(tmp_path)
    path.write_text(text)
    with pytest.raises(InputError):
        Binary.read(path)
    with pytest.raises(InputError):
        read_folder(tmp_path / "missing")
