"""The cuda backend inside torch: opcheck, compiled graphs, checkpoints, CUDA graphs, threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ratoon_kernels import TreeLayout, tree_attention
from ratoon_kernels.jit import tma
from ratoon_kernels.jit.calls import check_driver, driver
from ratoon_kernels.tree_attention import cuda
from tests.kernels.cuda_attention import (
    BACKEND,
    DEVICE,
    LONG_PROMPT,
    SIZES,
    Sizes,
    assert_same_bits,
    attention_of,
    make_problem,
    rounding_of,
    run_cuda,
)
from tests.kernels.forests import (
    NAMED,
    Problem,
    Results,
    comb,
    forest_from,
    relative_error,
    run,
    star,
)

pytestmark = pytest.mark.gpu

FOREST = forest_from([-1, 0, 0, 0, -1, 4, 5, 5], [300, 61, 200, 1, 270, 77, 255, 129])


@pytest.mark.parametrize("sizes", SIZES)
def test_both_ops_pass_opcheck(sizes: Sizes) -> None:
    """In deterministic mode: it compares calls, and sums in another order are not equal."""
    forest = NAMED["two_trees"]
    layout = forest.layout(DEVICE)
    problem = make_problem(forest.num_tokens, torch.bfloat16, sizes)
    q, k, v = (x.requires_grad_() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH))
    plan = cuda.plan(layout)
    sink_N = torch.linspace(-1, 1, q.shape[1], device=DEVICE)
    for dlse, sink in ((None, sink_N), (problem.dlse_NT, None)):
        settings = plan, sink, problem.scale, None, BACKEND, True
        args: Any = (q, k, v, layout.end_T, *settings)
        torch.library.opcheck(torch.ops.ratoon.tree_attention.default, args)
        out, lse = tree_attention(q, k, v, layout, problem.scale, sink_N=sink, backend=BACKEND)
        saved = [x.detach() for x in (q, k, v, out, lse)]
        args = (problem.dout_TNH, dlse, *saved, layout.end_T, *settings)
        torch.library.opcheck(torch.ops.ratoon.tree_attention_backward.default, args)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_full_graph_compiles_and_serves_other_forests(compiler: str) -> None:
    """No graph break, right values, and no new graph for the third size of forest."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn((64, 8 * 64), generator=generator) * 0.2).to(DEVICE, torch.bfloat16)

    def model(hidden: Tensor, layout: TreeLayout) -> tuple[Tensor, Tensor]:
        q, k, v = (hidden @ weight).view(-1, 8, 64).split((4, 2, 2), dim=1)
        out, lse = tree_attention(q, k, v, layout, 0.125, backend=BACKEND)
        return out * out, lse + 1

    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for forest in (FOREST, star(517, 7, 111), comb(6, 85), NAMED["two_trees"]):
        problem = make_problem(forest.num_tokens, torch.bfloat16, 64)
        hidden = problem.q_TNH[:, 0].clone().requires_grad_()
        layout, grads = forest.layout(DEVICE), (problem.dout_TNH, problem.dlse_NT)
        got, expected = (f(hidden, layout) for f in (compiled, model))
        (dgot,), (dexpected,) = (torch.autograd.grad(x, hidden, grads) for x in (got, expected))
        assert dexpected.norm() > 0
        for ours, same in zip((*got, dgot), (*expected, dexpected), strict=True):
            assert relative_error(ours.detach(), same.detach()) <= rounding_of(torch.bfloat16)
    assert counter.frame_count <= 2


def _count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each forward of the backend."""
    calls: list[int] = []
    forward = cuda.forward

    def counted(operands: Any) -> tuple[Tensor, Tensor]:
        calls.append(len(operands.queries))
        return forward(operands)

    monkeypatch.setattr(cuda, "forward", counted)
    return calls


def _keep_attention(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_ours = op == torch.ops.ratoon.tree_attention.default
    return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("is_selective", "num_forwards"), [(False, 2), (True, 1)])
def test_checkpointing_gives_the_same_bits(
    is_selective: bool, num_forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selective: output and log-sum-exp are kept, and the forward does not run again."""
    problem = make_problem(FOREST.num_tokens, torch.bfloat16, 128)
    attention = attention_of(FOREST.layout(DEVICE), problem.scale, deterministic=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(q * 2, k, v)
        return out * out, lse

    expected = run(attend, problem)
    calls = _count_forwards(monkeypatch)
    how: dict[str, Any] = {"use_reentrant": False}
    if is_selective:
        how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
    got = run(lambda q, k, v: checkpoint(attend, q, k, v, **how), problem)
    assert_same_bits(got, expected)
    assert len(calls) == num_forwards


def test_forward_and_backward_replay_in_a_cuda_graph() -> None:
    layout = FOREST.layout(DEVICE)
    problem, other = (
        make_problem(FOREST.num_tokens, torch.bfloat16, 128, seed=seed) for seed in range(2)
    )
    inputs = [x.clone().requires_grad_() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH)]
    dout_TNH, dlse_NT = problem.dout_TNH.clone(), problem.dlse_NT.clone()
    attention = attention_of(layout, problem.scale, deterministic=True)

    def step() -> Results:
        out, lse = attention(*inputs)
        dq, dk, dv = torch.autograd.grad((out, lse), inputs, (dout_TNH, dlse_NT))
        return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}

    # Kernels are loaded before the capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for held in (other, problem, other):
        with torch.no_grad():
            for x, new in zip(inputs, (held.q_TNH, held.k_TKH, held.v_TKH), strict=True):
                x.copy_(new)
            dout_TNH.copy_(held.dout_TNH)
            dlse_NT.copy_(held.dlse_NT)
        for result in results.values():
            result.fill_(torch.nan)
        graph.replay()
        assert_same_bits(results, run_cuda(layout, held, deterministic=True))


def test_two_streams_do_not_share_memory() -> None:
    """Both at once, again and again, each with its own results."""
    shapes = ((LONG_PROMPT, (8, 2)), (star(900, 131, 30), (8, 8)))
    layouts = [forest.layout(DEVICE) for forest, _ in shapes]
    problems = [
        make_problem(forest.num_tokens, torch.bfloat16, 128, heads=heads, seed=i)
        for i, (forest, heads) in enumerate(shapes)
    ]
    expected = [
        run_cuda(layout, problem, deterministic=True)
        for layout, problem in zip(layouts, problems, strict=True)
    ]
    streams = [torch.cuda.Stream() for _ in shapes]
    torch.cuda.synchronize()
    got: list[tuple[int, Results]] = []
    for _ in range(4):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                attention = attention_of(layouts[index], problems[index].scale, deterministic=True)
                got.append((index, run(attention, problems[index])))
    torch.cuda.synchronize()
    for index, results in got:
        assert_same_bits(results, expected[index], str(index))


def _without_context(work: Callable[[], None]) -> None:
    """Runs in a new thread, which has no driver context; raises what it raises."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            _drop_context()
            work()
        except BaseException as error:  # noqa: BLE001  it is raised below
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _drop_context() -> None:
    """This thread is then as one that never called CUDA; and no tensor map is encoded yet."""
    tma._encode.cache_clear()
    check_driver("cuCtxSetCurrent", driver().cuCtxSetCurrent(driver().CUcontext(0)))


def _thread_problem() -> tuple[TreeLayout, Problem, Results]:
    layout = FOREST.layout(DEVICE)
    problem = make_problem(FOREST.num_tokens, torch.float16, 64)
    return layout, problem, run_cuda(layout, problem, deterministic=True)


def test_a_backward_in_a_thread_without_a_context_is_right() -> None:
    """cuTensorMapEncodeTiled failed with CUDA_ERROR_INVALID_CONTEXT (201).

    The backward runs in a thread of autograd's own. Where it is the first work there that needs a
    context, and torch takes its memory from the cache, nothing has made one current before.
    """
    layout, problem, expected = _thread_problem()
    threads: list[int] = []
    inputs = [x.clone().requires_grad_() for x in (problem.q_TNH, problem.k_TKH, problem.v_TKH)]
    out, lse = attention_of(layout, problem.scale, deterministic=True)(*inputs)

    def drop(_gradient: Tensor) -> None:
        threads.append(threading.get_ident())
        _drop_context()

    out.register_hook(drop)
    grads = torch.autograd.grad((out, lse), inputs, (problem.dout_TNH, problem.dlse_NT))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert_same_bits(dict(zip(("dq", "dk", "dv"), grads, strict=True)), {
        name: expected[name] for name in ("dq", "dk", "dv")
    })  # fmt: skip


def test_a_thread_that_never_called_cuda_can_run_both_ways() -> None:
    layout, problem, expected = _thread_problem()
    results: list[Results] = []

    def work() -> None:
        attention = attention_of(layout, problem.scale, deterministic=True)
        results.append(run(attention, problem))

    _without_context(work)
    torch.cuda.synchronize()
    assert_same_bits(results[0], expected)


def test_threads_with_streams_of_their_own_get_their_own_results() -> None:
    """As a server's workers: the Python side of a launch is shared, and must not be mixed up."""
    layouts = [FOREST.layout(DEVICE), comb(6, 85).layout(DEVICE)]
    problems = [
        make_problem(layout.num_tokens, torch.bfloat16, 128, seed=seed)
        for seed, layout in enumerate(layouts)
    ]
    expected = [
        run_cuda(layout, problem, deterministic=True)
        for layout, problem in zip(layouts, problems, strict=True)
    ]
    torch.cuda.synchronize()
    is_equal: list[bool] = []

    def work(index: int) -> None:
        attention = attention_of(layouts[index], problems[index].scale, deterministic=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                got = run(attention, problems[index])
                is_equal.extend(torch.equal(got[name], x) for name, x in expected[index].items())

    threads = [threading.Thread(target=work, args=(index % 2,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_equal == [True] * (4 * 10 * 5)
