"""The CUDA layer on a GPU: tensor maps, launches and clusters move the values that they should."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ratoon_kernels.jit import (
    CudaCallError,
    Kernel,
    Param,
    head_tile_map,
    load,
    memset_zero,
    tensor_map,
)
from ratoon_kernels.jit.cache import get_cubin
from tests.kernels.cuda_kernels import CLUSTER_SUM, SCALARS, TILE_COPY, tile_copy

pytestmark = pytest.mark.gpu

SHARED_BYTES = 64 * 1024
MiB = 2**20


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def _copy(x_TNH: Tensor, rows: int, first_token: int, num_tiles: int) -> Tensor:
    """What the kernel reads: [heads, num_tiles * rows, head_dim], from an output full of NaN."""
    _, heads, head_dim = x_TNH.shape
    spec = tile_copy(head_dim=head_dim, rows=rows, is_bf16=x_TNH.dtype == torch.bfloat16)
    size, start = heads * num_tiles * rows * head_dim, 3
    out = torch.full((start + size + 3,), torch.nan, device="cuda")
    load(spec, 0).launch(
        grid=(num_tiles, heads, 1),
        block=128,
        shared_bytes=SHARED_BYTES,
        stream=_stream(),
        args=(head_tile_map(x_TNH, rows), out, first_token, start, 1.0),
    )
    assert out[:start].isnan().all()
    assert out[-3:].isnan().all()
    return out[start:-3].view(heads, num_tiles * rows, head_dim)


def _with_zeros(x_TNH: Tensor, first_token: int, num_rows: int) -> Tensor:
    """Expected copy, by torch: rows before and past the tensor's tokens are zeros."""
    tokens, heads, head_dim = x_TNH.shape
    wanted = torch.zeros((heads, num_rows, head_dim), device="cuda")
    start = max(first_token, 0)
    stop = max(start, min(first_token + num_rows, tokens))
    wanted[:, start - first_token : stop - first_token] = x_TNH[start:stop].transpose(0, 1).float()
    return wanted


LAYOUTS: dict[str, Callable[[int, torch.dtype], Tensor]] = {
    "contiguous": lambda d, dtype: _random(150, 3, d, dtype=dtype),
    "part of a fused projection": lambda d, dtype: _random(150, 7, d, dtype=dtype)[:, 2:5],
    "heads outermost": lambda d, dtype: _random(3, 150, d, dtype=dtype).transpose(0, 1),
    "every other token": lambda d, dtype: _random(300, 3, d, dtype=dtype)[::2],
    "channels of a wider row": lambda d, dtype: _random(150, 3, d + 24, dtype=dtype)[..., 8:-16],
    "one token": lambda d, dtype: _random(1, 3, d, dtype=dtype),
    "one head": lambda d, dtype: _random(150, 1, d, dtype=dtype),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_boxes_of_any_layout_hold_the_tensor_and_zeros_outside(
    layout: str, head_dim: int, dtype: torch.dtype
) -> None:
    x_TNH = LAYOUTS[layout](head_dim, dtype)
    for rows, first_token, num_tiles in ((64, 0, 3), (64, -5, 2), (128, 40, 1), (16, 149, 1)):
        got = _copy(x_TNH, rows, first_token, num_tiles)
        wanted = _with_zeros(x_TNH, first_token, num_tiles * rows)
        assert torch.equal(got, wanted), (rows, first_token)
    assert _copy(x_TNH, 64, 0, 1).norm() > 0


def test_scalars_and_struct_fields_arrive_in_the_types_of_the_spec() -> None:
    """Also an int for a float: it is that number, not the float of its bits."""
    out = torch.full((7,), torch.nan, dtype=torch.float64, device="cuda")
    load(SCALARS, 0).launch(
        grid=(1, 1, 1), block=1, shared_bytes=0, stream=_stream(),
        args=(-7, -(2**31), 2**40 + 1, 3, out, 11, -(2**50) - 1, 0.375),
    )  # fmt: skip
    assert out.tolist() == [-7, -(2**31), 2**40 + 1, 3, 11, -(2**50) - 1, 0.375]


def test_kernels_run_on_the_stream_they_are_given() -> None:
    """The copy waits for the slow work before it on its own stream."""
    source = torch.zeros((64, 2, 128), dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        source.fill_(3)
        got = _copy(source, 64, 0, 1)
    stream.synchronize()
    assert (got == 3).all()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_cluster_blocks_read_their_neighbours(size: int) -> None:
    num_blocks = 16
    out = torch.full((num_blocks,), -1, dtype=torch.int32, device="cuda")
    load(CLUSTER_SUM, 0).launch(
        grid=(num_blocks, 1, 1),
        block=64,
        shared_bytes=0,
        stream=_stream(),
        args=(out,),
        cluster=(size, 1, 1),
    )
    block = torch.arange(num_blocks)
    neighbour = block // size * size + (block % size + 1) % size
    assert torch.equal(out.cpu().long(), 1000 * size + neighbour)


@pytest.mark.parametrize("start", [8, 9])
@pytest.mark.parametrize("num_bytes", [0, 1, 4, 6, 4096, 3 * MiB + 2])
def test_memset_zeroes_the_tensor_and_nothing_else(num_bytes: int, start: int) -> None:
    memory = torch.full((num_bytes + 16,), 7, dtype=torch.uint8, device="cuda")
    memset_zero(memory[start : start + num_bytes], _stream())
    assert (memory[start : start + num_bytes] == 0).all()
    assert (memory[:start] == 7).all()
    assert (memory[start + num_bytes :] == 7).all()


def test_a_thread_without_a_context_can_load_and_launch() -> None:
    """Autograd and servers call from threads that never touched CUDA before."""
    x_TNH = _random(70, 2, 64)
    spec = tile_copy(head_dim=64, rows=32, is_bf16=True)
    out = torch.full((2, 33, 64), torch.nan, device="cuda")
    stream = _stream()

    def work() -> None:
        memset_zero(out, stream)
        Kernel(spec, 0, get_cubin(spec)).launch(
            grid=(1, 2, 1), block=128, shared_bytes=SHARED_BYTES, stream=stream,
            args=(head_tile_map(x_TNH, 32), out, 0, 0, 1.0),
        )  # fmt: skip

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    copied, rest = out.flatten().split([2 * 32 * 64, 2 * 64])
    assert torch.equal(copied.view(2, 32, 64), x_TNH[:32].transpose(0, 1).float())
    assert (rest == 0).all()


def test_threads_launch_the_same_kernel_with_their_own_arguments() -> None:
    kernel = load(TILE_COPY, 0)
    x_TNH = _random(64, 1, 128)
    outs = torch.full((4, 50, 64, 128), torch.nan, device="cuda")
    stream = _stream()

    def work(thread: int) -> None:
        for step in range(50):
            kernel.launch(
                grid=(1, 1, 1), block=128, shared_bytes=SHARED_BYTES, stream=stream,
                args=(head_tile_map(x_TNH, 64), outs[thread, step], 0, 0, thread * 100.0 + step),
            )  # fmt: skip

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    scale = 100.0 * torch.arange(4)[:, None] + torch.arange(50)
    wanted = scale[:, :, None, None].cuda() * x_TNH[:, 0].float()
    assert torch.equal(outs, wanted)


def test_launches_and_memsets_replay_in_a_graph() -> None:
    kernel = load(TILE_COPY, 0)
    x_TNH = _random(64, 1, 128)
    out = torch.full((65, 128), torch.nan, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        memset_zero(out, _stream())
        kernel.launch(
            grid=(1, 1, 1), block=128, shared_bytes=SHARED_BYTES, stream=_stream(),
            args=(head_tile_map(x_TNH, 64), out, 0, 0, 1.0),
        )  # fmt: skip
    assert out.isnan().all()
    x_TNH.copy_(_random(64, 2, 128)[:, :1])
    graph.replay()
    assert torch.equal(out[:64], x_TNH[:, 0].float())
    assert (out[64] == 0).all()


def test_a_refused_launch_names_the_kernel_and_the_driver_s_words() -> None:
    kernel = load(TILE_COPY, 0)
    out = torch.zeros(64 * 128, device="cuda")
    args = (head_tile_map(_random(64, 1, 128), 64), out, 0, 0, 1.0)
    with pytest.raises(CudaCallError, match=r"shared memory for tile_copy.*CUDA_ERROR_INVALID"):
        kernel.launch(
            grid=(1, 1, 1), block=128, shared_bytes=MiB, stream=_stream(), args=args
        )  # fmt: skip
    with pytest.raises(CudaCallError, match=r"launch of tile_copy.*block=2048.*INVALID_VALUE"):
        kernel.launch(grid=(1, 1, 1), block=2048, shared_bytes=0, stream=_stream(), args=args)


def test_arguments_of_other_types_are_refused() -> None:
    kernel = load(TILE_COPY, 0)
    x_TNH, out = _random(64, 1, 128), torch.zeros(64 * 128, device="cuda")
    box = head_tile_map(x_TNH, 64)
    for args in ((box, out, 0, 0), (x_TNH, out, 0, 0, 1.0), (box, out, 0.5, 0, 1.0)):
        with pytest.raises(TypeError, match=r"takes .TENSOR_MAP, POINTER, INT32"):
            kernel.launch(grid=(1, 1, 1), block=128, shared_bytes=0, stream=_stream(), args=args)
    with pytest.raises(AssertionError, match="tensor of device -1"):
        kernel.launch(
            grid=(1, 1, 1), block=128, shared_bytes=0, stream=_stream(),
            args=(box, out.cpu(), 0, 0, 1.0),
        )  # fmt: skip


def test_a_spec_with_other_parameters_than_its_kernel_is_not_loaded() -> None:
    params = (*TILE_COPY.params[:-1], Param.INT64)
    with pytest.raises(AssertionError, match=r"parameter 4 of tile_copy.* has 4 bytes"):
        load(replace(TILE_COPY, params=params), 0)
    with pytest.raises(CudaCallError, match="parameter 5 of tile_copy"):
        load(replace(TILE_COPY, params=(*TILE_COPY.params, Param.INT32)), 0)


def test_maps_are_encoded_once_for_the_same_memory_and_view() -> None:
    x_TNH = _random(64, 2, 128)
    assert head_tile_map(x_TNH, 64) is head_tile_map(x_TNH.view(64, 2, 128), 64)
    assert head_tile_map(x_TNH, 64) != head_tile_map(x_TNH, 32)
    assert head_tile_map(x_TNH, 64) != head_tile_map(x_TNH[1:], 64)
    flat = tensor_map(
        x_TNH, dims=(64, 64), strides_bytes=(512,), box=(32, 8), swizzle_bytes=64
    )  # fmt: skip
    assert len(flat) == 128
