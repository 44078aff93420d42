"""The CPU kernels, compiled by numba on the user's machine. Never imported where there is nothing to run on a CPU."""
