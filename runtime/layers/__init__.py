"""The parts of a decoder, over the kernels. Never reads a file."""
