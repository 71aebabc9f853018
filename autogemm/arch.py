"""What the hardware allows, per compute architecture and per GPU, each number with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from .errors import InputError

ArchName = Literal["sm_90a", "sm_100a"]
ARCH_NAMES: Final[tuple[ArchName, ...]] = get_args(ArchName)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arch:
    """Limits of one compute architecture.

    Attributes:
        smem_bytes: dynamic shared memory one CTA may use.
        registers_per_sm: 32-bit registers of one SM.
        max_registers: 32-bit registers one thread may use.
        tmem_columns: 32-bit columns of tensor memory, 128 lanes each (0: the arch has none).
        tensor_flops_per_clock: dense 16-bit-input FLOPs per SM and clock.
    """

    name: ArchName
    smem_bytes: int
    registers_per_sm: int
    max_registers: int
    tmem_columns: int
    tensor_flops_per_clock: int


# smem_bytes: 227 KiB per block, CUDA C++ Programming Guide, "Compute Capabilities", 9.0 and 10.0.
# registers: the same table. tmem_columns: PTX ISA, "Tensor Memory" (128 lanes x 512 columns of 32 bits).
# tensor_flops_per_clock: 989 TFLOP/s / (132 SMs x 1.83 GHz) for H100 SXM; SemiAnalysis B200 microbenchmarks for sm_100a.
ARCHS: Final[dict[str, Arch]] = {
    "sm_90a": Arch(
        name="sm_90a", smem_bytes=232_448, registers_per_sm=65_536, max_registers=255, tmem_columns=0,
        tensor_flops_per_clock=4096,
    ),
    "sm_100a": Arch(
        name="sm_100a", smem_bytes=232_448, registers_per_sm=65_536, max_registers=255, tmem_columns=512,
        tensor_flops_per_clock=8192,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU model.

    Attributes:
        slug: folder name under ``tuned/``.
        product: substring of the name the driver reports.
        sm_count: streaming multiprocessors of the full part.
        l2_bytes: L2 cache size.
        dram_bytes_per_s: device-memory bandwidth of the data sheet.
        max_clock_hz: highest SM clock.
    """

    slug: str
    product: str
    arch: ArchName
    sm_count: int
    l2_bytes: int
    dram_bytes_per_s: float
    max_clock_hz: float


# H200: NVIDIA data sheet (4.8 TB/s), cudaDeviceProp on a card (132 SMs, 60 MB L2, 1980 MHz).
# H100 SXM: NVIDIA data sheet (3.35 TB/s, 50 MB L2). B200: data sheet (8 TB/s), 148 SMs, SemiAnalysis (1.965 GHz); 126 MB L2.
GPUS: Final[dict[str, Gpu]] = {
    gpu.slug: gpu
    for gpu in (
        Gpu(slug="nvidia-h200", product="H200", arch="sm_90a", sm_count=132, l2_bytes=60 << 20,
            dram_bytes_per_s=4.8e12, max_clock_hz=1.98e9),
        Gpu(slug="nvidia-h100", product="H100", arch="sm_90a", sm_count=132, l2_bytes=50 << 20,
            dram_bytes_per_s=3.35e12, max_clock_hz=1.98e9),
        Gpu(slug="nvidia-b200", product="B200", arch="sm_100a", sm_count=148, l2_bytes=126 << 20,
            dram_bytes_per_s=8.0e12, max_clock_hz=1.965e9),
    )
}  # fmt: skip

# The GPU a prediction is for when only an arch is asked for.
DEFAULT_GPU: Final[dict[ArchName, str]] = {"sm_90a": "nvidia-h200", "sm_100a": "nvidia-b200"}


def arch(name: str) -> Arch:
    """Return the Arch called ``name``.

    Raises:
        InputError: no such arch.
    """
    found = ARCHS.get(name)
    if found is None:
        raise InputError(f"unknown arch {name!r}; supported: {', '.join(ARCHS)}")
    return found


def gpu(slug: str) -> Gpu:
    """Return the Gpu with folder name ``slug``.

    Raises:
        InputError: no such GPU.
    """
    found = GPUS.get(slug)
    if found is None:
        raise InputError(f"unknown GPU {slug!r}; known: {', '.join(GPUS)}")
    return found


def gpu_slug(device_name: str) -> str:
    """Return the folder name for a name the driver reports (``NVIDIA H200`` -> ``nvidia-h200``), known GPU or not."""
    for known in GPUS.values():
        if known.product in device_name.split():
            return known.slug
    return "-".join("".join(c if c.isalnum() else " " for c in device_name.lower()).split())
