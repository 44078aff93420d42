"""The CPU kernels, compiled by numba on the user's machine."""
