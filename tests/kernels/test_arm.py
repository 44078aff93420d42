"""Arm's tiles give the plain loop's bits: compiled for Arm, linked into a C program, and run by qemu's user mode.

``make test-arm`` runs them, where qemu-aarch64 and a cross compiler are installed. On every machine
``test_integer.test_a_tile_multiplies_with_its_instruction`` compiles the same tiles and reads their assembly.
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from phloem.cpu_isa import ISAS
from phloem.tests.kernels.test_integer import NUM_GROUPS, target_machine, tile_case, tile_module

QEMU, CC = "qemu-aarch64", "aarch64-linux-gnu-gcc"
TRIPLE = "aarch64-unknown-linux-gnu"
CPUS = {"neon_i8mm": "neoverse-v1", "neon_dotprod": "neoverse-n1", "portable": "cortex-a57"}  # as LLVM knows them
TILES = [(bits, x_bits) for bits in (4, 8) for x_bits in (8, 16)]

# Reads cases from stdin: tile, rows, bytes of weights and of the record, then both; writes the rows of 16 outputs.
PROGRAM = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
{declarations}
static void (*const tiles[])(int64_t, int64_t, int64_t, int64_t) = {{ {names} }};
int main(void) {{
    int64_t head[4];
    while (fread(head, sizeof head, 1, stdin) == 1) {{
        char *weights = malloc(head[2]), *record = malloc(head[3]);
        float *out = calloc(head[1], 64);
        if (fread(weights, head[2], 1, stdin) != 1 || fread(record, head[3], 1, stdin) != 1) return 1;
        tiles[head[0]]((int64_t)weights, (int64_t)record, {num_groups}, (int64_t)out);
        fwrite(out, 64, head[1], stdout);
    }}
    return 0;
}}
"""


@pytest.mark.arm
@pytest.mark.parametrize("name", CPUS)
def test_a_tile_of_arm_is_the_loop_s_to_the_bit(name: str, tmp_path: Path) -> None:
    for program in (QEMU, CC):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    one = next(one for one in ISAS if one.name == name)
    features = ",".join(f"+{feature}" for feature in one.features) if name != "portable" else ""
    machine = target_machine(TRIPLE, CPUS[name], features)
    names, objects, given, expected = [], [], b"", []
    for bits, x_bits in TILES:
        packed, record, wanted = tile_case(one, bits, x_bits)
        for num_rows in one.tile_rows:
            tile = f"tile_{bits}_{x_bits}_{num_rows}"
            place = tmp_path / f"{tile}.o"
            place.write_bytes(machine.emit_object(tile_module(one, num_rows, bits, x_bits, machine, name=tile)))
            header = np.array([len(names), num_rows, len(packed), len(record)], dtype=np.int64)
            given += header.tobytes() + packed.tobytes() + record.tobytes()
            expected.append(wanted[:num_rows])
            names.append(tile)
            objects.append(place)
    source, program = tmp_path / "main.c", tmp_path / "main"
    declarations = "\n".join(f"void {tile}(int64_t, int64_t, int64_t, int64_t);" for tile in names)
    source.write_text(PROGRAM.format(declarations=declarations, names=", ".join(names), num_groups=NUM_GROUPS))
    subprocess.run([CC, "-static", "-O1", "-o", program, source, *objects, "-lm"], check=True)
    done = subprocess.run([QEMU, "-cpu", "max", program], input=given, capture_output=True, check=True, timeout=120)
    found = np.frombuffer(done.stdout, dtype=np.float32).reshape(-1, 16)
    differing, start = [], 0
    for tile, wanted in zip(names, expected, strict=True):
        if not np.array_equal(found[start : start + len(wanted)], wanted):
            differing.append(tile)
        start += len(wanted)
    assert start == len(found) and not differing
