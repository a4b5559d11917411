"""A journal that loses its end is noticed, whatever it was, and nothing else is deleted."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import inspect

from ratoon.engine.files.losses import Choice, JournalLoss, read_loss, write_decision
from ratoon.engine.files.paths import policy_paths, require_known
from ratoon.engine.journal.connections import connect
from ratoon.engine.journal.store import SqlStore
from ratoon.engine.policy.losses import judge, look
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationState, PolicyState
from tests.durability.cut_log import (
    COMMANDS,
    DATABASE,
    LOG,
    Life,
    cut,
    files_of,
    judge_start,
    leave,
    live,
    log_ends,
    machine_at,
    weights_of,
)
from tests.engine.harness import DISCARD, RATE, Machine, code_of
from tests.engine.local_ports import POLICY
from tests.until import until
from tests.work_units import rows

# A log that began anew over an old one, and one in its first use.
LENGTHS = (len(COMMANDS), 12)
SHARES = (0.3, 0.7, 0.9)


@pytest.fixture(scope="module", params=LENGTHS)
def life(request: pytest.FixtureRequest, ram: Path) -> Iterator[Life]:
    folder = ram / f"life-{request.param}"
    yield asyncio.run(live(folder, request.param))
    shutil.rmtree(folder)


@pytest.fixture
def root(ram: Path) -> Iterator[Path]:
    """What one cut led to."""
    yield ram / "cut"
    shutil.rmtree(ram / "cut", ignore_errors=True)


def sizes_of(life: Life) -> list[int | None]:
    """No log, an empty one, every end of a frame, and places in the middle of some."""
    ends = list(log_ends((life.root / LOG).read_bytes()))
    return [None, 0, *ends, *(end + 1000 for end in ends[:-1:8])]


def share_of(life: Life, share: float) -> int:
    *_, end = log_ends((life.root / LOG).read_bytes())
    return int(share * end)


@contextmanager
def store_at(root: Path) -> Generator[SqlStore | None]:
    """The journal of a folder; None: it has no policy."""
    engine = connect(f"sqlite:///{root / DATABASE}")
    try:
        has_tables = inspect(engine).has_table("policies")
        store = SqlStore(engine) if has_tables else None
        yield store if store is not None and store.policy(POLICY) is not None else None
    finally:
        engine.dispose()


def is_whole(life: Life, store: SqlStore) -> bool:
    """Whether the journal has all that callers were told."""
    ended = {told.operation_id: told.state for told in life.ended}
    for told in (*life.ended, *life.queued):
        record = store.find_operation(told.operation_id)
        if record is None or ended.get(told.operation_id, told.state) is not record.state.public:
            return False
    return True


async def refused(life: Life, machine: Machine) -> None:
    """Nothing is served that is older, nothing is deleted, and what is known is told."""
    before = files_of(machine.root)
    failure = await judge_start(life, machine)
    assert "the journal has lost its end" in failure
    assert files_of(machine.root) == before
    row = machine.journal.store.policy(POLICY)
    assert row is not None
    assert (row.state, row.failure) == (PolicyState.FAILED, failure)
    with pytest.raises(RatoonError, match="the journal has lost its end") as caught:
        await machine.update(1000, 1.0)
    assert caught.value.code is ErrorCode.POLICY_FAILED
    newest = await machine.controller.weight_manifest(None)
    assert newest.version == life.version, "readers are given an older version"
    assert machine.worker.is_released


async def refused_loss(life: Life, root: Path) -> JournalLoss:
    """What the policy was refused for at its first start."""
    machine = machine_at(root, life.spec)
    await refused(life, machine)
    await leave(machine)
    loss = read_loss(machine.paths)
    assert loss is not None
    return loss


async def decided(life: Life, root: Path, choice: Choice) -> Machine:
    """A machine that was refused once and started again with the choice."""
    await refused_loss(life, root)
    write_decision(policy_paths(root, POLICY), choice)
    machine = machine_at(root, life.spec)
    await machine.controller.start()
    return machine


def needs_deleted_files(machine: Machine, before: set[tuple[str, str]]) -> bool:
    """Whether the state that is left cannot be reached, which is told and changes nothing."""
    loss = read_loss(machine.paths)
    assert loss is not None
    assert files_of(machine.root) == before
    return bool(loss.adoptable) and "--accept-loss is not possible" in machine.run.failure


async def goes_on(life: Life, machine: Machine) -> None:
    """A new operation runs on what is left, under a new version, and a restart changes nothing."""
    left = weights_of(machine)
    # A window may be open, and operations may have waited for this seq.
    await machine.end(await machine.submit(machine.run.sequencer.next_free, DISCARD, 0))
    await until(lambda: machine.run.sequencer.peek() is None)
    assert weights_of(machine)[: len(left)] == left
    again = await machine.end(await machine.update(machine.run.sequencer.next_free, 500))
    assert again.state is OperationState.DONE
    assert getattr(again.result, "version", 0) > life.version
    weights = weights_of(machine)
    assert weights[-1] == ((500.0,), RATE)
    await machine.landed()
    await leave(machine)
    assert read_loss(machine.paths) is None
    machine = machine_at(machine.root, life.spec)
    await machine.controller.start()
    assert machine.run.state is PolicyState.READY
    assert weights_of(machine) == weights
    await leave(machine)


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(test)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.more)])
def test_a_cut_at_any_frame_is_noticed_where_anything_is_lost(
    life: Life, root: Path, every: int
) -> None:
    found, outcomes = look(policy_paths(life.root, POLICY)), Counter[str]()
    for size_bytes in (*sizes_of(life)[::every], share_of(life, 1.0)):
        cut(life, root, size_bytes, has_files=False)
        with store_at(root) as store:
            if store is None:
                outcomes["unknown"] += 1  # The service does not start: `require_known`.
            elif judge(store.history(POLICY), found, life.spec.sequencing) is not None:
                outcomes["lost"] += 1
            else:
                assert is_whole(life, store), f"cut to {size_bytes} bytes"
                outcomes["whole"] += 1
    assert outcomes["lost"] > 2 * outcomes["whole"] > 0


def test_readers_keep_a_version_whose_publication_alone_is_lost(life: Life, root: Path) -> None:
    """Red once: the journal had the update, not the publication, and readers got the one before."""
    for size_bytes in log_ends((life.root / LOG).read_bytes()):
        cut(life, root, size_bytes, has_files=False)
        with store_at(root) as store:
            row = store.policy(POLICY) if store is not None else None
            if row is not None and row.version == life.version not in row.published:
                break
    else:
        pytest.fail("no cut loses the publication alone")
    shutil.rmtree(root)
    cut(life, root, size_bytes)

    async def test() -> None:
        machine = machine_at(root, life.spec)
        await refused(life, machine)
        await leave(machine)

    run(test())


@pytest.mark.parametrize("share", [None, 0.7, 0.9])
def test_a_policy_is_refused_until_somebody_decides(
    life: Life, root: Path, share: float | None
) -> None:
    """Red once: the start went on from an older version and deleted the newer ones."""

    async def test() -> None:
        for _ in range(2):
            machine = machine_at(root, life.spec)
            await refused(life, machine)
            await leave(machine)

    cut(life, root, None if share is None else share_of(life, share))
    with store_at(root) as store:
        if store is None:  # The journal was in its log alone.
            with pytest.raises(RatoonError, match="the journal does not know p"):
                require_known(root, [])
            return
    run(test())


@pytest.mark.parametrize("share", rows(SHARES, now=(0.7,)))
def test_a_loss_is_accepted_by_whoever_says_so(life: Life, root: Path, share: float) -> None:
    """What is left goes on; what was lost can be sent again, and makes other versions."""
    cut(life, root, share_of(life, share))
    before = files_of(root)

    async def test() -> None:
        machine = await decided(life, root, Choice.ACCEPT_LOSS)
        if machine.run.state is PolicyState.FAILED:
            assert needs_deleted_files(machine, before)
            await leave(machine)
            return
        await until(lambda: machine.run.sequencer.peek() is None)
        num_left = len(machine.weights)
        assert weights_of(machine) == life.weights[:num_left]
        assert files_of(root) >= before
        await goes_on(life, machine)

    run(test())


@pytest.mark.parametrize("share", rows((0.1, 0.3), now=(0.3,)))
def test_a_checkpoint_of_what_was_lost_is_gone_on_from(
    life: Life, root: Path, share: float
) -> None:
    """No seq up to the checkpoint's is applied again, and later ones go on from its state."""
    cut(life, root, share_of(life, share))

    async def test() -> None:
        loss = await refused_loss(life, root)
        if not loss.adoptable:
            with pytest.raises(RatoonError, match="there is no checkpoint of what was lost"):
                write_decision(policy_paths(root, POLICY), Choice.FROM_EVIDENCE)
            return
        write_decision(policy_paths(root, POLICY), Choice.FROM_EVIDENCE)
        machine = machine_at(root, life.spec)
        await machine.controller.start()
        assert machine.run.state is PolicyState.READY
        (adopted,) = (
            known.info
            for known in machine.journal.store.checkpoints(POLICY)
            if known.info.checkpoint_id == loss.adoptable
        )
        num_left = len(machine.weights)
        assert (num_left, machine.run.version) == (adopted.version, adopted.version)
        assert weights_of(machine) == life.weights[:num_left]
        for seq in range(loss.journal.last_seq + 1, adopted.seq + 1):
            command, number = COMMANDS[seq - 1]
            ended = await machine.end(await machine.submit(seq, command, number))
            assert code_of(ended) == ErrorCode.WORKER_LOST
            assert f"the journal lost how seq {seq} ended" in str(ended.result)
        assert len(machine.weights) == num_left
        await goes_on(life, machine)

    run(test())


@pytest.mark.more
def test_a_start_at_any_cut_serves_all_or_refuses(life: Life, root: Path) -> None:
    async def test(size_bytes: int | None) -> bool:
        shutil.rmtree(root, ignore_errors=True)
        cut(life, root, size_bytes)
        machine = machine_at(root, life.spec)
        before = files_of(root)
        failure = await judge_start(life, machine)
        assert not failure or files_of(root) == before
        await leave(machine)
        return bool(failure)

    sizes: list[int | None] = []
    for size_bytes in sizes_of(life):
        with store_at(cut(life, root, size_bytes, has_files=False)) as store:
            sizes += [size_bytes] if store is not None else []
    refusals = [asyncio.run(test(size)) for size in sizes]
    assert sum(refusals) > len(sizes) // 2
    assert not refusals[sizes.index(share_of(life, 1.0))]
