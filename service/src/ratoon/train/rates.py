"""The rates by which a policy's updates are planned: known, kept by an earlier start, or measured.

They decide how an update is cut, and no bit of what a cut computes. The journal has the cuts of
every operation that ended, what layers keep follows from cuts and bytes, and all ranks run the
plans of the first. So a replay finds its bits by any rates, and no fingerprint has them.

A device is measured by the operations of a decoder layer and an LM head, in seconds, in a process
of its own: what a process has run decides which graphs its compilers make of what it runs later,
and by that bits.

    python -m ratoon.train.rates cuda:0
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess  # nosec B404 - of this package's own module
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ratoon.log import get_logger
from ratoon.planner.device_costs import H200_RATES, KNOWN_RATES, PAIR_FLOPS, DeviceRates
from ratoon.stream.files import (
    DamagedFileError,
    digest_bytes,
    make_folder,
    seal_document,
    unseal_document,
    write_atomic,
)
from ratoon.train.numerics import device_model
from ratoon.train.spec import TrainerSpec
from ratoon_kernels import build_layout, token_logprobs_forward_backward, tree_attention

# Format of the measurement: another number, other files.
_FORMAT = 1
# A process that imports torch, compiles a few kernels and runs them.
_PATIENCE_S = 180.0
_LOG = get_logger("rates")
# Share of the FLOP/s of products alone that whole steps reach: on an H200 653 of 803 TFLOP/s.
_STEP_SHARE = 0.81
_NUM_SAMPLES = 5


def rates_of(spec: TrainerSpec, folder: Path | None) -> DeviceRates | None:
    """Rates of the spec's GPU, which has to be free of all else; None for a CPU.

    A GPU that is not known is measured, once where there is a `folder` to keep its rates in. If
    that fails, an H200's are used.
    """
    device = torch.device(spec.device)
    if device.type != "cuda":
        return None
    name = device_model(device)
    if name in KNOWN_RATES:
        return KNOWN_RATES[name]
    key = {
        "format": str(_FORMAT),
        "device": name,
        "attention_backend": spec.attention_backend,
        "deterministic": str(spec.deterministic).lower(),
        "torch": str(torch.__version__),
        "kernels": version("ratoon-kernels"),
    }
    try:
        return kept_rates(folder, key, partial(_measure, spec))
    except (OSError, ValueError, subprocess.SubprocessError) as err:
        _LOG.warning("rates not measured: those of an H200 are used", device=name, error=str(err))
        return H200_RATES


def kept_rates(
    folder: Path | None, key: Mapping[str, str], measure: Callable[[], DeviceRates]
) -> DeviceRates:
    """The rates of `key` in the folder; measured if there are none, or no whole ones.

    Raises what `measure` does. Rates that cannot be kept are used all the same.
    """
    path = None if folder is None else folder / f"rates-{digest_bytes(seal_document(key))}.json"
    kept = None if path is None else _read(path, key)
    if kept is not None:
        return kept
    rates = measure()
    _LOG.info("rates measured", **key, **asdict(rates))
    if path is not None:
        try:
            make_folder(path.parent)
            write_atomic(path, seal_document({"key": dict(key), "rates": asdict(rates)}))
        except OSError as err:
            _LOG.warning("rates not kept", path=str(path), error=str(err))
    return rates


def _read(path: Path, key: Mapping[str, str]) -> DeviceRates | None:
    try:
        fields = unseal_document(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, DamagedFileError) as err:
        _LOG.warning("kept rates are unreadable", path=str(path), error=str(err))
        return None
    return _rates(fields["rates"]) if fields["key"] == dict(key) else None


def _rates(fields: Mapping[str, float]) -> DeviceRates:
    """Raises ValueError for what no device has."""
    rates = DeviceRates(**fields)
    if not all(0 < rate < math.inf for rate in asdict(rates).values()):
        raise ValueError(f"rates of no device: {dict(fields)}")
    return rates


def _measure(spec: TrainerSpec) -> DeviceRates:
    """Raises OSError, SubprocessError and ValueError."""
    command = [sys.executable, "-m", __name__, spec.device]
    command += [f"--backend={spec.attention_backend}"]
    command += ["--deterministic"] * spec.deterministic
    done = subprocess.run(  # nosec B603
        command, stdout=subprocess.PIPE, check=True, timeout=_PATIENCE_S
    )
    return _rates(json.loads(done.stdout.strip().rpartition(b"\n")[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Sizes of a decoder layer with attention and a dense MLP."""

    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is run: a layer of `sizes` on `tokens`, its LM head on `rows`, a copy of `copied_bytes`.

    `least`, on `few_tokens`: a layer that takes no longer than it takes to launch.
    """

    sizes: BlockSizes
    least: BlockSizes
    vocab_size: int
    tokens: int
    few_tokens: int
    rows: int
    copied_bytes: int


# A layer of Qwen3-8B, by which the known rates were found, and a part of its head.
_LAYER = BlockSizes(hidden_size=4096, mlp_size=12_288, num_heads=32, num_kv_heads=8, head_dim=128)
SHAPE = Shape(
    sizes=_LAYER,
    least=replace(_LAYER, hidden_size=256, mlp_size=512, num_heads=2, num_kv_heads=1),
    vocab_size=32_768,
    tokens=8192,
    few_tokens=16,
    rows=4096,
    copied_bytes=2**30,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Which tree attention a policy has: a backend's name, "" for the best, and its mode."""

    backend: str
    deterministic: bool

    def of_path(self, device: torch.device, num_tokens: int) -> Callable[..., Tensor]:
        """Attention of one path: q_TNH, k_TKH and v_TKH to out_TNH."""
        layout = build_layout(
            node_start=np.array([0]),
            node_stop=np.array([num_tokens]),
            node_end=np.array([num_tokens]),
            node_parent=np.array([-1]),
            device=device,
        )
        backend, deterministic = self.backend or None, self.deterministic

        def run(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
            scale = q_TNH.shape[-1] ** -0.5
            out_TNH, _ = tree_attention(
                q_TNH, k_TKH, v_TKH, layout, scale, backend=backend, deterministic=deterministic
            )
            return out_TNH

        return run


def measure_rates(
    device: torch.device,
    attention: Attention,
    shape: Shape = SHAPE,
    clock: Callable[[], float] = time.perf_counter,
) -> DeviceRates:
    """Work over the median seconds of a few samples of it, by `clock`, in bfloat16."""
    sizes = shape.sizes
    seconds = partial(_median_s, device, clock)
    linear_flops = 6 * shape.tokens * sizes.hidden_size * sizes.mlp_size
    pairs = shape.tokens * (shape.tokens + 1) // 2
    head_flops = 6 * shape.rows * shape.vocab_size * sizes.hidden_size
    # One device alone has no link: that is an H200's.
    return replace(
        H200_RATES,
        linear_flops=_STEP_SHARE * linear_flops / seconds(_products(device, shape)),
        attention_flops=PAIR_FLOPS
        * (sizes.num_heads * sizes.head_dim * pairs)
        / seconds(_attention(device, shape, attention)),
        head_flops=head_flops / seconds(_head(device, shape)),
        # Read and written.
        memory_bytes=2 * shape.copied_bytes / seconds(_copy(device, shape)),
        layer_call_s=seconds(_layer(device, shape, attention)),
    )


def _median_s(device: torch.device, clock: Callable[[], float], run: Callable[[], object]) -> float:
    """Median of the samples after a first run, which may compile."""
    run()
    samples: list[float] = []
    for _ in range(_NUM_SAMPLES):
        _wait(device)
        start = clock()
        run()
        _wait(device)
        samples.append(clock() - start)
    return statistics.median(samples)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _new(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _products(device: torch.device, shape: Shape) -> Callable[[], object]:
    """A weight's product, the gradient of its input, and its own."""
    hidden, wide = shape.sizes.hidden_size, shape.sizes.mlp_size
    x_TD, dy_TF = _new(device, shape.tokens, hidden), _new(device, shape.tokens, wide)
    weight_DF = _new(device, hidden, wide)
    return lambda: (x_TD @ weight_DF, dy_TF @ weight_DF.T, x_TD.T @ dy_TF)


def _attention(
    device: torch.device, shape: Shape, attention: Attention
) -> Callable[[], Sequence[Tensor]]:
    sizes = shape.sizes
    heads = sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads
    qkv = [_new(device, shape.tokens, n, sizes.head_dim).requires_grad_() for n in heads]
    dout_TNH = _new(device, shape.tokens, sizes.num_heads, sizes.head_dim)
    attend = attention.of_path(device, shape.tokens)
    return lambda: torch.autograd.grad(attend(*qkv), qkv, dout_TNH)


def _head(device: torch.device, shape: Shape) -> Callable[[], object]:
    """Log-probs of a token of each row, and gradients of their sum."""
    rows, vocab_size = shape.rows, shape.vocab_size
    hidden_RD = _new(device, rows, shape.sizes.hidden_size)
    lm_head_VD = _new(device, vocab_size, shape.sizes.hidden_size)
    row_R = torch.arange(rows, device=device)
    temperature_R = torch.ones(rows, device=device)

    def seeds_of(_rows: slice, logprob_M: Tensor, _entropy_R: Tensor) -> tuple[Tensor, None]:
        return torch.ones_like(logprob_M), None

    return partial(
        token_logprobs_forward_backward,
        hidden_RD,
        lm_head_VD,
        row_R % vocab_size,
        row_R,
        temperature_R,
        seeds_of,
        needs_lm_head=True,
    )


def _copy(device: torch.device, shape: Shape) -> Callable[[], object]:
    source = torch.zeros(shape.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _layer(
    device: torch.device, shape: Shape, attention: Attention
) -> Callable[[], Sequence[Tensor]]:
    """Forward and backward of all of the least layer: norms, products, attention, residuals."""
    sizes, tokens = shape.least, shape.few_tokens
    hidden, head_dim = sizes.hidden_size, sizes.head_dim
    heads = sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads
    to_heads = [_new(device, hidden, n * head_dim) for n in heads]
    to_out = _new(device, sizes.num_heads * head_dim, hidden)
    gate, up = _new(device, hidden, sizes.mlp_size), _new(device, hidden, sizes.mlp_size)
    down = _new(device, sizes.mlp_size, hidden)
    norms = [_new(device, hidden), _new(device, hidden)]
    weights = [each.requires_grad_() for each in (*to_heads, to_out, gate, up, down, *norms)]
    x_TD, dy_TD = _new(device, tokens, hidden), _new(device, tokens, hidden)
    attend = attention.of_path(device, tokens)

    def run() -> Sequence[Tensor]:
        normed_TD = functional.rms_norm(x_TD, (hidden,), norms[0])
        q, k, v = (
            (normed_TD @ weight).view(tokens, n, head_dim)
            for weight, n in zip(to_heads, heads, strict=True)
        )
        y_TD = x_TD + attend(q, k, v).flatten(1) @ to_out
        normed_TD = functional.rms_norm(y_TD, (hidden,), norms[1])
        y_TD = y_TD + (functional.silu(normed_TD @ gate) * (normed_TD @ up)) @ down
        return torch.autograd.grad(y_TD, weights, dy_TD)

    return run


def main(arguments: list[str] | None = None) -> None:
    """Print the rates as the last line, JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", type=torch.device)
    parser.add_argument("--backend", default="", help="of tree attention; the best one by default")
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args(arguments)
    attention = Attention(backend=args.backend, deterministic=args.deterministic)
    rates = measure_rates(args.device, attention)
    sys.stdout.write(f"\n{json.dumps(asdict(rates))}\n")


if __name__ == "__main__":
    main()
