"""The reference backend on a GPU: it is the truth that the kernels there are compared with."""

import pytest
import torch

from ratoon_kernels import (
    merge_partials,
    token_logprobs,
    tree_attention,
    tree_attention_partial_forward,
)
from tests.kernels.forests import (
    NAMED,
    assert_close,
    dense_oracle,
    random_forests,
    random_problem,
    relative_error,
    run,
)

pytestmark = pytest.mark.gpu


def test_tree_attention_equals_the_dense_oracle() -> None:
    forests = [*NAMED.values(), *random_forests(seed=0, count=40, max_nodes=14, max_length=15)]
    for index, forest in enumerate(forests):
        problem = random_problem(
            forest.num_tokens, heads=4, kv_heads=2, head_dim=16, dtype=torch.float64, seed=index,
            device="cuda",
        )  # fmt: skip
        layout = forest.layout("cuda")
        got = run(
            lambda q, k, v, layout=layout, scale=problem.scale: tree_attention(
                q, k, v, layout, scale, backend="reference"
            ),
            problem,
        )
        assert_close(got, dense_oracle(forest.mask(), problem), 1e-10, str(index))
        half = forest.num_tokens // 2
        merged = None
        for start, stop in ((0, half), (half, forest.num_tokens)):
            k, v = problem.k_TKH[start:stop], problem.v_TKH[start:stop]
            more = tree_attention_partial_forward(
                problem.q_TNH, k, v, layout, problem.scale, query_start=0, key_start=start,
                backend="reference",
            )  # fmt: skip
            merged = more if merged is None else merge_partials(*merged, *more)
        assert merged is not None
        if forest.num_tokens:
            assert relative_error(merged[0], got["out"]) < 1e-12


def test_token_logprobs_equal_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((50, 12), generator=generator, dtype=torch.float64)
    head = torch.randn((301, 12), generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 301, (200,), generator=generator)
    rows = torch.randint(0, 50, (200,), generator=generator)
    temperature = torch.rand(50, generator=generator, dtype=torch.float64) + 0.5
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in (hidden, head)]
        logprob, entropy = token_logprobs(
            leaves[0], leaves[1], *(x.to(device) for x in (targets, rows, temperature)),
            backend="reference",
        )  # fmt: skip
        grads = torch.autograd.grad(logprob.sum() + (entropy * entropy).sum(), leaves)
        results.append([x.detach().cpu() for x in (logprob, entropy, *grads)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert relative_error(on_gpu, on_cpu) < 1e-12
