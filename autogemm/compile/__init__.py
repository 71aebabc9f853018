"""CUDA text to cubin: the compiler, the cache of its results and the worker processes that run it."""
