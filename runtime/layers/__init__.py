"""The parts of a decoder, built on the kernels."""
