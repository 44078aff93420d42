"""The GPU kernels, in Triton. Never imported where no tensor lies on a GPU, except by tests under the interpreter."""
