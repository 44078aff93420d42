"""Triton's interpreter for the kernels of this folder: it has to be chosen before they are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
