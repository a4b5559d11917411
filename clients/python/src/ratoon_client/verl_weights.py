"""verl's checkpoint engine `ratoon`: its rollouts pull the version of the last step themselves.

In: which version the actor's policy has, over verl's topology. Out: in each rollout worker, the
version's tensors on the worker's device. No weight passes through the trainer. Invariant: all
workers of a sync yield one version, pulled and verified whole before the first tensor.
Imports verl and torch.
"""

# Where verl is not installed, its classes have no type.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakMethod

from torch import Tensor
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_id

from ratoon_client.async_client import AsyncRatoonClient
from ratoon_client.config import lock_folder
from ratoon_client.errors import InvalidArgumentError, RatoonClientError
from ratoon_client.weights.disk import own_folder
from ratoon_client.weights.hf_module import read_tensors
from ratoon_client.weights.receiver import own_id

_LOG = logging.getLogger("ratoon_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version of a policy, and the URL of its service."""

    url: str
    policy_id: str
    version: int


def device_tensors(folder: Path) -> Generator[tuple[str, Tensor]]:
    """Tensors of a version by their names in the model's files, one at a time on verl's device.

    Raises EngineError.
    """
    device = get_device_id()
    for name, value in read_tensors(folder).items():
        yield name, value.to(device)


@CheckpointEngineRegistry.register("ratoon")
class RatoonCheckpointEngine(CheckpointEngine):
    """One of a sync's two sides: `prepare` of the actor says which version, the rollouts pull it.

    Args:
        bucket_size: Unused: verl's rollouts fill their own buckets.
        is_master: Whether this is the actor's.
        root: A folder of versions for all rollout workers of a host, which is made. None: one below
            the temporary folder. Two versions of a policy stay there.
    """

    # Set by the engine of a policy that is trained: verl gives a checkpoint engine nothing of the
    # engine beside it. A worker of verl's trains one.
    source: ClassVar[WeakMethod[Callable[[], Published]] | None] = None

    def __init__(
        self, bucket_size: int, is_master: bool = False, root: Path | str | None = None
    ) -> None:
        self._is_master = is_master
        self._root = None if root is None else Path(root).absolute()
        self._published: Published | None = None
        self._served: int | None = None

    def prepare(self) -> Published | None:
        """The version of the last step, from the actor; None from a rollout worker.

        Raises:
            InvalidArgumentError: The actor is not one of RatoonActorConfig.
        """
        if not self._is_master:
            return None
        published = None if self.source is None else self.source()
        if published is None:
            raise InvalidArgumentError(
                "actor_rollout_ref.rollout.checkpoint_engine.backend",
                "'ratoon'",
                "another one: actor_rollout_ref.actor is no ratoon_client.verl.RatoonActorConfig",
            )
        return published()

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Published | None],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """What the actor published, for each worker; workers meet nowhere but at the service."""
        published = [metadata[0]]
        return (
            {"published": published * actor_wg_world_size},
            {"published": published * rollout_world_size},
        )

    def init_process_group(self, published: Published) -> None:
        self._published = published

    def finalize(self) -> None:
        """Nothing: files stay for the next version's delta."""

    async def send_weights(
        self, weights: Generator[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send nothing, and read none of `weights`; the metric is the version that is pulled."""
        weights.close()
        assert self._published is not None, "init_process_group comes first"
        return {"ratoon/version": float(self._published.version)}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, Tensor]]:
        """Pull the version, once for all workers of the host, and yield its tensors.

        The service counts the workers of a host as one receiver.

        Raises:
            IntegrityError, TransportError, RatoonApiError, OSError: The version did not come whole;
                nothing was yielded.
            EngineError: A file has no tensors.
        """
        published = self._published
        assert published is not None, "init_process_group comes first"
        root = self._root or own_folder(lock_folder()) / "verl"
        root = root / published.policy_id
        receiver_id = own_id(root)
        async with AsyncRatoonClient(published.url) as client:

            async def acknowledge(version: int | None, holds_version: int | None = None) -> None:
                try:
                    await client.ack_weights(
                        published.policy_id,
                        receiver_id,
                        version=version,
                        holds_version=holds_version,
                    )
                except RatoonClientError as error:
                    _LOG.info("%s: not acknowledged: %s", published.policy_id, error)

            await acknowledge(self._served, holds_version=published.version)
            pulled = await client.pull_weights(published.policy_id, root, published.version)
            for item in device_tensors(pulled.folder):
                yield item
            await acknowledge(published.version)
        self._served = published.version
        _LOG.info(
            "%s: version %d is served, %d bytes fetched in %.2f s",
            published.policy_id,
            published.version,
            pulled.fetched_bytes,
            pulled.fetch_s,
        )
