"""autogemm: an autotuning GEMM kernel generator."""

__version__ = "0.1.0"
