"""Stores rollouts of a step with what was found of them, for those who look at a run.

One file a step, named by its seq: the size of its head in 8 bytes, the sealed head, a serialized
`StepRollouts`, and a sealed block of columns for each of the head's rollouts. Replay writes
the same file again. Files are bounded in bytes, and the oldest go first.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.batch import prompt_lengths
from ratoon.rollout.forest import build_forest, sequences_through
from ratoon.rollout.packed import Forest
from ratoon.rollout.raw import MAX_ID
from ratoon.stream.files import (
    SEAL_BYTES,
    DamagedFileError,
    make_folder,
    seal_bytes,
    unseal_bytes,
    write_atomic,
)
from ratoon_proto.types import KeepRollouts
from ratoon_proto.v1.rollout_pb2 import KeptRollout, PrefixForest, StepRollouts

if TYPE_CHECKING:
    from ratoon.train.rollout_figures import FoundRollouts, RolloutFigures

# How many rollouts `worst` keeps by each criterion.
NUM_WORST = 16
MAX_KEPT = 10_000
_HEAD = struct.Struct("<Q")
# Columns of a block by response token, after the int32 ids of all tokens.
_COLUMNS = (("advantages", "<f4"), ("gaps", "<f4"), ("ratios", "<f4"))
_FLAGS = ("clipped", "trained")
_Size = TypeVar("_Size", int, NDArray[np.int64])


def write_rollouts(
    folder: Path,
    seq: int,
    found: FoundRollouts,
    named: AbstractSet[tuple[int, int]],
    *,
    keep: KeepRollouts,
    max_bytes: int,
) -> None:
    """Write the file of a step, and delete those of the oldest for which there is no room.

    `named`: group and rollout, by index, of those that warnings name; -1: all of the group. Raises
    `OSError`.
    """
    make_folder(folder)
    batch = found.prepared.batch
    forest = build_forest(batch, found.prepared.prefixes, None)
    head = StepRollouts(forest=_forest_message(forest, batch.rewards))
    room = max_bytes - _HEAD.size - SEAL_BYTES - head.ByteSize()
    sizes_S = _block_bytes(prompt_lengths(batch), found.figures.length_S)
    chosen: list[int] = []
    messages: dict[int, KeptRollout] = {}
    for sequence in _by_conspicuousness(found.figures, named, keep):
        message = _summary(found, forest, sequence)
        # A tag and a length go with each message.
        room -= int(sizes_S[sequence]) + message.ByteSize() + 8
        if room < 0:
            break
        chosen.append(sequence)
        messages[sequence] = message
    chosen.sort()
    head.rollouts.extend(messages[sequence] for sequence in chosen)
    sealed = seal_bytes(head.SerializeToString(deterministic=True))
    data = b"".join([_HEAD.pack(len(sealed)), sealed, *_blocks(found, chosen)])
    if _make_room(folder, seq, len(data), max_bytes):
        write_atomic(folder / str(seq), data)


def read_rollouts(folder: Path, seq: int) -> StepRollouts:
    """Everything of a step but columns. Raises ROLLOUTS_NOT_FOUND."""
    with _opened(folder, seq) as file:
        return _read_head(file)


def read_rollout(folder: Path, seq: int, group: int, rollout: int) -> KeptRollout:
    """One kept rollout whole, but for texts. Raises ROLLOUTS_NOT_FOUND."""
    with _opened(folder, seq) as file:
        for kept in _read_head(file).rollouts:
            num_bytes = _block_bytes(kept.prompt_tokens, kept.response_tokens)
            if (kept.group, kept.rollout) == (group, rollout):
                return _with_columns(kept, unseal_bytes(file.read(num_bytes)))
            file.seek(num_bytes, 1)
    place = f"groups[{group}].rollouts[{rollout}]"
    raise _not_found(f"{place}: it is not kept of seq {seq}", "rollout", place, "one that is kept")


def _by_conspicuousness(
    figures: RolloutFigures, named: AbstractSet[tuple[int, int]], keep: KeepRollouts
) -> Sequence[int]:
    """Sequences to keep, the most conspicuous first, ties in request order."""
    place_S = np.full(len(figures.length_S), len(figures.length_S))
    weight_S = np.abs(figures.advantage_S) * figures.length_S
    for value_S in (figures.gap_max_S, weight_S, figures.reward_S, -figures.reward_S):
        there = np.flatnonzero(~np.isnan(value_S))
        order = there[np.argsort(-value_S[there], kind="stable")]
        place_S[order] = np.minimum(place_S[order], np.arange(len(order)))
    places = zip(figures.group_S.tolist(), figures.rollout_S.tolist(), strict=True)
    place_S[[not named.isdisjoint([place, (place[0], -1)]) for place in places]] = -1
    order = np.argsort(place_S, kind="stable")
    if keep is KeepRollouts.WORST:
        order = order[place_S[order] < NUM_WORST]
    return order[:MAX_KEPT].tolist()


def _summary(found: FoundRollouts, forest: Forest, s: int) -> KeptRollout:
    batch, figures = found.prepared.batch, found.figures
    group = int(np.searchsorted(batch.group_offsets, s, side="right")) - 1
    version = int(batch.policy_version[s])
    return KeptRollout(
        group=int(figures.group_S[s]),
        group_id=batch.group_ids[group][:MAX_ID],
        rollout=int(figures.rollout_S[s]),
        prompt_tokens=int(batch.prompt_offsets[group + 1] - batch.prompt_offsets[group]),
        response_tokens=int(figures.length_S[s]),
        reward=_known(figures.reward_S[s]),
        advantage=_known(figures.advantage_S[s]),
        gap_abs_mean=_known(figures.gap_abs_mean_S[s]),
        gap_max=_known(figures.gap_max_S[s]),
        gap_max_token=_known_index(figures.gap_max_token_S[s]),
        ratio_max=_known(figures.ratio_max_S[s]),
        ratio_max_token=_known_index(figures.ratio_max_token_S[s]),
        clip_fraction=_known(figures.clipped_S[s]),
        policy_version=_known_index(version),
        truncated=bool(batch.truncated[s]),
        dropped=not found.prepared.selection.kept_S[s],
        leaf=int(forest.sequence_node[s]),
        weight_share=_known(figures.weight_share_S[s]),
    )


def _known(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)


def _known_index(value: np.int64 | int) -> int | None:
    return None if value < 0 else int(value)


def _forest_message(forest: Forest, reward_S: NDArray[np.float64] | None) -> PrefixForest:
    num_through = sequences_through(forest)
    reward_mean = np.full(len(num_through), np.nan)
    if reward_S is not None:
        reward_mean = sequences_through(forest, reward_S) / num_through
    return PrefixForest(
        parent=forest.node_parent.tolist(),
        num_tokens=(forest.node_stop - forest.node_start).tolist(),
        num_rollouts=num_through.tolist(),
        reward_mean=reward_mean.tolist(),
    )


def _block_bytes(prompt_tokens: _Size, response_tokens: _Size) -> _Size:
    """Bytes of a rollout's sealed columns."""
    own = 4 * len(_COLUMNS) + len(_FLAGS)
    return 4 * (prompt_tokens + response_tokens) + own * response_tokens + SEAL_BYTES


def _blocks(found: FoundRollouts, sequences: Sequence[int]) -> list[bytes]:
    """The sealed columns of each sequence."""
    batch, offsets = found.prepared.batch, found.prepared.batch.response_offsets
    columns = (
        found.prepared.columns.advantage_J.astype("<f4"),
        found.gaps().astype("<f4"),
        found.ratios().astype("<f4"),
        found.clipped(),
        found.prepared.columns.trained_J,
    )
    return [
        seal_bytes(
            b"".join(
                [
                    batch.sequence_tokens(s).astype("<i4").tobytes(),
                    *(column[offsets[s] : offsets[s + 1]].tobytes() for column in columns),
                ]
            )
        )
        for s in sequences
    ]


def _with_columns(kept: KeptRollout, block: bytes) -> KeptRollout:
    num_tokens, place = kept.prompt_tokens + kept.response_tokens, 0

    def taken(dtype: str, count: int) -> list[Any]:
        nonlocal place
        values = np.frombuffer(block, dtype, count, place)
        place += values.nbytes
        return values.tolist()

    kept.tokens.extend(taken("<i4", num_tokens))
    for name, dtype in _COLUMNS:
        getattr(kept, name).extend(taken(dtype, kept.response_tokens))
    for name in _FLAGS:
        getattr(kept, name).extend(taken("?", kept.response_tokens))
    return kept


def _make_room(folder: Path, seq: int, num_bytes: int, max_bytes: int) -> bool:
    """Delete the oldest files until `num_bytes` of `seq` fit; whether these are not the oldest."""
    paths = [path for path in folder.iterdir() if path.name.isdigit()]
    sizes = {int(path.name): path.stat().st_size for path in paths}
    sizes[seq] = num_bytes
    total = sum(sizes.values())
    for oldest in sorted(sizes):
        if total <= max_bytes:
            break
        (folder / str(oldest)).unlink(missing_ok=True)
        total -= sizes.pop(oldest)
    return seq in sizes


@contextlib.contextmanager
def _opened(folder: Path, seq: int) -> Generator[BinaryIO]:
    """The file of a step. What it raises for one that is missing or damaged is not found."""
    kept = "an Update or ForwardBackward whose rollouts are kept (keep_rollouts), and still there"
    try:
        with (folder / str(seq)).open("rb") as file:
            yield file
    except FileNotFoundError as err:
        text = f"no rollouts of seq {seq} are kept: the policy's keep_rollouts says which would be"
        raise _not_found(text, "seq", str(seq), kept) from err
    except (DamagedFileError, struct.error) as err:
        text = f"the rollouts of seq {seq} are damaged"
        raise _not_found(text, "seq", str(seq), kept) from err


def _read_head(file: BinaryIO) -> StepRollouts:
    (size,) = _HEAD.unpack(file.read(_HEAD.size))
    rest = file.seek(0, 2) - file.seek(_HEAD.size)
    if size > rest:
        raise DamagedFileError(f"a head of {size} bytes in {rest}")
    return StepRollouts.FromString(unseal_bytes(file.read(size)))


def _not_found(message: str, field: str, got: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.ROLLOUTS_NOT_FOUND, message, field=field, got=got, expected=expected
    )
