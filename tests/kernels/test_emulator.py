"""The emulator sees what a kernel does wrong, and multiplies as the matrix units do."""

import ctypes

import pytest
import torch
from helpers import generator
from kernels.emulator import HERE, EmulatedKernel, Emulator

from oscarkv.kernels.cuda.compile import _source

TYPES = """
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__
struct alignas(8) Pair { float x, y; };
struct alignas(16) Quad { u32 x, y, z, w; };
struct alignas(16) Float4 { float x, y, z, w; };
"""


def run(emulator: Emulator, body: str, *tensors: torch.Tensor, threads: int = 32) -> EmulatedKernel:
    """Launches `kernel(const u32* in, u32* out)` of that body."""
    prelude = f'#include "{HERE}/machine.h"\n{TYPES}#include "{HERE}/instructions.h"\n'
    head = 'extern "C" void kernel(const u32* in, u32* out)'
    library = emulator.library(f"{prelude}{head} {{ {body} }}\nKERNEL(kernel)\n")
    kernel = EmulatedKernel(library, "kernel")
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    for _ in range(2):  # warps in order, and in reverse
        kernel.launch((1, 1, 1), threads, *pointers)
    return kernel


def blank(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("if (threadIdx.x < 32) __syncthreads(); else return; __syncthreads();", None),
        ("if (threadIdx.x == 40) __syncwarp();", "never come"),
        ("if (threadIdx.x % 2) __syncwarp(); else __any_sync(~0u, 1);", "different things"),
        ("load_quad((const u8*)in + 8);", "not aligned"),
        ("out[0] = (u32)*(const u64*)(in + 1);", "not aligned, line"),
        ("u32 x[2] = {}; out[0] = x[2 + in[0]];", "beyond its array"),
    ],
    ids="threads-that-ended a-lane-alone two-kinds alignment alignment-in-C bounds".split(),
)
def test_what_a_gpu_would_fault_on_or_wait_for_ends_a_launch(
    emulator: Emulator, body: str, error: str | None
) -> None:
    x = torch.zeros(16, dtype=torch.int32)
    if error is None:
        run(emulator, body, x, x, threads=64)
    else:
        with pytest.raises(AssertionError, match=error):
            run(emulator, body, x, x, threads=64)


def test_what_another_warp_writes_needs_a_barrier(emulator: Emulator) -> None:
    body = """
        u32* s = (u32*)machine::shared;
        s[threadIdx.x] = threadIdx.x;
        {barrier}
        out[threadIdx.x] |= s[63 - threadIdx.x] != 63 - threadIdx.x;
    """
    found = []
    for barrier in ("", "__syncthreads();"):
        out = blank(64)
        run(emulator, body.replace("{barrier}", barrier), out, out, threads=64)
        found.append(out.any(0).item())
    assert found == [True, False]


def test_copies_arrive_when_they_are_waited_for(emulator: Emulator) -> None:
    body = """
        u32* s = (u32*)machine::shared;
        for (int i = 0; i < 2; i++) {
            u32* to = s + 128 * i + 4 * threadIdx.x;
            copy_async_once(__cvta_generic_to_shared(to), in + 4 * threadIdx.x, 0);
            commit_copies();
        }
        {wait}
        for (int i = 0; i < 2; i++) out[32 * i + threadIdx.x] = s[128 * i + 4 * threadIdx.x];
    """
    given = torch.arange(128, dtype=torch.int32)
    here, nowhere = given[::4], torch.full((32,), -1, dtype=torch.int32)
    for wait, expected in (("", (nowhere, nowhere)), ("1", (here, nowhere)), ("0", (here, here))):
        out = blank(64)
        waiting = f"wait_copies<{wait}>();" if wait else ""
        run(emulator, body.replace("{wait}", waiting), given, out)
        assert torch.equal(out, torch.cat(expected))


def test_products_are_those_of_matrices(emulator: Emulator) -> None:
    """Fragments as PTX draws them: of A [16, k] and B [k, 8], row by row in memory."""
    body = """
        const int g = threadIdx.x / 4, t = threadIdx.x % 4;
        const u32 *a = in, *b = in + 128;  // B lies column by column
        float d[4] = {0, 0, 0, 0};
        int e[4] = {0, 0, 0, 0};
        const u32 x[6] = {a[8 * g + t], a[8 * g + 64 + t], a[8 * g + 4 + t], a[8 * g + 68 + t],
                          b[8 * g + t], b[8 * g + 4 + t]};
        mma_half(d, x[0], x[1], x[2], x[3], x[4], x[5]);
        mma_bytes(e, x[0], x[1], x[2], x[3], x[4], x[5]);
        for (int i = 0; i < 4; i++) {
            const int at = (g + 8 * (i / 2)) * 8 + 2 * t + i % 2;
            out[at] = __float_as_uint(d[i]);
            out[128 + at] = e[i];
        }
    """
    rng = generator(0)
    a, b = torch.randn(16, 16, generator=rng).half(), torch.randn(16, 8, generator=rng).half()
    memory = torch.cat([a.flatten(), b.mT.flatten()]).view(torch.int32)
    out = blank(256)
    run(emulator, body, memory, out)
    torch.testing.assert_close(out[:128].view(torch.float32).view(16, 8), a.float() @ b.float())
    bytes_a, bytes_b = a.view(torch.uint8).int(), b.mT.contiguous().view(torch.int8).int()
    assert torch.equal(out[128:].view(16, 8), bytes_a @ bytes_b.mT)


def test_matrices_of_pairs_are_transposed(emulator: Emulator) -> None:
    x = torch.arange(64, dtype=torch.int16).view(8, 8)
    out = blank(32)
    run(emulator, "out[threadIdx.x] = transpose_8x8(in[threadIdx.x]);", x.view(torch.int32), out)
    assert torch.equal(out.view(torch.int16).view(8, 8), x.mT)


def test_every_instruction_is_emulated() -> None:
    """What is added to ptx.cuh is missing in instructions.h."""
    declared = {
        line.split("(")[0].split()[-1]
        for line in _source("ptx.cuh").splitlines()
        if line.startswith(("DEVICE", "template"))
    }
    assert len(declared) > 20
    emulated = (HERE / "instructions.h").read_text()
    assert [name for name in declared if f" {name}(" not in emulated] == []
