"""The GPU kernels, in Triton. Imported with the first op on a GPU, and by tests under Triton's interpreter."""
