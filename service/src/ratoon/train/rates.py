"""The rates by which a policy's updates are planned: known, kept by an earlier start, or measured.

They decide how an update is cut, and no bit of what a cut computes. The journal has the cuts of
every operation that ended, what layers keep follows from cuts and bytes, and all ranks run the
plans of the first. So a replay finds its bits by any rates, and no fingerprint has them.
"""

from __future__ import annotations

import json
import math
import subprocess  # nosec B404 - of this package's own module
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

from ratoon.log import get_logger
from ratoon.planner.device_costs import H200_RATES, KNOWN_RATES, DeviceRates
from ratoon.stream.files import (
    DamagedFileError,
    digest_bytes,
    make_folder,
    seal_document,
    unseal_document,
    write_atomic,
)
from ratoon.train import measured_rates
from ratoon.train.numerics import device_model
from ratoon.train.spec import TrainerSpec

# Format of the measurement: another number, other files.
_FORMAT = 1
# A process that imports torch, compiles a few kernels and runs them.
_PATIENCE_S = 180.0
_LOG = get_logger("rates")


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
    command = [sys.executable, "-m", measured_rates.__name__, spec.device]
    command += [f"--backend={spec.attention_backend}"]
    command += ["--deterministic"] * spec.deterministic
    done = subprocess.run(  # nosec B603
        command, stdout=subprocess.PIPE, check=True, timeout=_PATIENCE_S
    )
    return _rates(json.loads(done.stdout.strip().rpartition(b"\n")[2]))
