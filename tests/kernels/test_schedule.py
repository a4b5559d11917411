"""The kernels' work lists against the dense mask: every attended pair once, and no other."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ratoon_kernels import Span
from ratoon_kernels.schedule import (
    BACKWARD_STRIDE,
    SPLIT_KV_HEADS,
    TILE_SIZE,
    Schedule,
    ScheduleHeader,
    Section,
    build_schedule,
)
from ratoon_kernels.tree_attention.cuda_specs import BACKWARD_QUERIES
from tests.kernels.forests import NAMED, Forest, comb, forest_from, random_forests, star
from tests.kernels.schedule_twin import IntArray, Twin, random_spans
from tests.work_units import rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Queries and keys of a forest on a grid of their own, swept by steps of each of some sizes."""

    forest: Forest
    queries: Span
    keys: Span
    tile: int
    stride: int
    steps: tuple[int, ...]
    window: int | None = None

    def schedule(self) -> Schedule:
        layout = self.forest.layout()
        window = None if self.window is None else layout.window(self.window)
        return build_schedule(
            layout.end_T.numpy(), self.queries, self.keys, window,
            tile_size=self.tile, stride=self.stride,
        )  # fmt: skip

    def check_pairs(self, table: IntArray, header: ScheduleHeader) -> None:
        """The forward and each split of the backward compute what the dense mask holds."""
        twin = Twin(table, header, tile=self.tile, step=self.steps[0])
        padding = -len(self.keys) % self.tile
        rows, columns = slice(self.queries.start, self.queries.stop), slice(*_ends(self.keys))
        expected = np.pad(self.forest.mask(self.window)[rows, columns], ((0, 0), (0, padding)))
        np.testing.assert_array_equal(twin.forward(), expected)
        for step in self.steps:
            twin = Twin(table, header, tile=self.tile, step=step)
            for level in header.levels:
                np.testing.assert_array_equal(twin.backward(level), expected)
            np.testing.assert_array_equal(twin.backward_with_dq(), expected)


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.stop


def _whole(forest: Forest, tile: int, step: int) -> Case:
    tokens = Span(0, forest.num_tokens)
    return Case(forest=forest, queries=tokens, keys=tokens, tile=tile, stride=step, steps=(step,))


def _of_the_kernels(forest: Forest) -> Case:
    steps = tuple(sorted(set(BACKWARD_QUERIES.values())))
    assert all(BACKWARD_STRIDE % step == 0 for step in steps), "a cut leaves part of a step"
    assert max(steps) <= TILE_SIZE, "a step past the end of a range reaches the next one"
    return replace(_whole(forest, TILE_SIZE, 1), stride=BACKWARD_STRIDE, steps=steps)


def _check_order(schedule: Schedule) -> None:
    items = [tuple(item) for item in schedule.forward_items.tolist()]
    assert items == sorted(items, key=lambda item: (-item[3], item[0]))
    swept = schedule.sweep.pieces.tolist()
    by_length = sorted(range(len(swept)), key=lambda i: (swept[i][1] - swept[i][2], i))
    assert [piece[6] for piece in swept] == by_length
    for level in schedule.levels:
        pieces = [tuple(piece) for piece in level.pieces.tolist()]
        assert pieces == sorted(pieces, key=lambda piece: (piece[1] - piece[2], piece[:2]))


def _check_splits(schedule: Schedule, stride: int) -> None:
    """The rule of the splits, one key tile and one cap at a time."""
    tile, num_key_tiles = schedule.tiles.tile_size, len(schedule.end) // schedule.tiles.tile_size
    lengths: list[int] = []
    for j in range(num_key_tiles):
        first_row = max(0, j * tile - schedule.delta) // 8 * 8
        last_row = int(schedule.end[j * tile : (j + 1) * tile].max()) - 1
        is_swept = max(0, j * tile - schedule.delta) <= last_row
        lengths.append(-(-(last_row + 1 - first_row) // stride) if is_swept else 0)
    for heads, level in zip(SPLIT_KV_HEADS, schedule.levels, strict=True):
        cap = max(1, -(-heads * sum(lengths) // (132 * 8)))
        while sum(-(-n // cap) for n in lengths if n > cap) > num_key_tiles:
            cap += 1
        pieces = level.pieces.tolist()
        assert level.num_slots <= num_key_tiles
        for j, length in enumerate(lengths):
            own = sorted(piece[1:4] for piece in pieces if piece[0] == j)
            sizes = [-(-(stop - start) // stride) for start, stop, _ in own]
            assert len(own) == -(-length // cap)
            assert sum(sizes) == length
            assert not own or max(sizes) - min(sizes) <= 1
            slots = [slot for _, _, slot in own]
            split = [row[1:3] for row in level.split_tiles.tolist() if row[0] == j]
            assert split == ([[slots[0], len(slots)]] if length > cap else [])
            expected = range(slots[0], slots[0] + len(slots)) if length > cap else [-1] * len(own)
            assert slots == list(expected)


def _check(case: Case) -> Schedule:
    schedule = case.schedule()
    table, header = schedule.pack()
    assert ScheduleHeader.from_tensor(header.to_tensor()) == header
    case.check_pairs(table, header)
    if case.stride % 8 == 0:
        for work in (schedule.sweep, *schedule.levels):
            assert not (work.pieces[:, 1] % 8).any(), "the kernels keep eight rows together"
    _check_order(schedule)
    if case.window is None:
        _check_splits(schedule, case.stride)
    return schedule


@pytest.mark.parametrize(
    ("seed", "count", "max_nodes", "max_length"),
    [
        *((0, 100, 6, 5), (1, 80, 16, 6), (2, 25, 60, 2), (3, 25, 8, 24)),
        pytest.param(0, 1500, 6, 5, marks=pytest.mark.more),
        pytest.param(1, 1000, 16, 6, marks=pytest.mark.more),
        pytest.param(2, 250, 60, 2, marks=pytest.mark.more),
        pytest.param(3, 250, 8, 24, marks=pytest.mark.more),
    ],
)
def test_every_attended_pair_is_computed_once_on_random_forests(
    seed: int, count: int, max_nodes: int, max_length: int
) -> None:
    rng = np.random.default_rng(seed)
    num_split = num_raised = 0
    for forest in random_forests(seed, count, max_nodes, max_length):
        tile, step = (int(x) for x in rng.integers(1, 9, 2))
        case = _whole(forest, tile, step)
        schedule = _check(case)
        num_split += len(schedule.levels[-1].split_tiles) > 0
        num_raised += any(level.num_slots == len(schedule.end) // tile for level in schedule.levels)
        queries, keys = random_spans(rng, forest.num_tokens)
        _check(replace(case, queries=queries, keys=keys))
    # The cases must come up that the builder is there for.
    assert num_split > count // 20
    assert num_raised > 0


@pytest.mark.parametrize("name", NAMED)
def test_every_attended_pair_is_computed_once_on_named_forests(name: str) -> None:
    rng = np.random.default_rng(0)
    for case in (_of_the_kernels(NAMED[name]), _whole(NAMED[name], 16, 10)):
        _check(case)
        for _ in range(4):
            queries, keys = random_spans(rng, case.forest.num_tokens)
            _check(replace(case, queries=queries, keys=keys))


REAL_SIZES: dict[str, Forest] = {
    "star": star(1000, 6, 170),
    "short": star(257, 12, 40),
    "comb": comb(8, 129),
    "sequences": forest_from([-1] * 4, [128, 640, 384, 1]),
    "two_trees": forest_from([-1, 0, 1, 1, 0, -1, 5, 5], [400, 30, 210, 190, 127, 666, 1, 302]),
}


@pytest.mark.parametrize("name", REAL_SIZES)
def test_every_attended_pair_is_computed_once_on_the_kernels_own_grid(name: str) -> None:
    rng = np.random.default_rng(1)
    case = _of_the_kernels(REAL_SIZES[name])
    _check(case)
    for _ in range(6):
        queries, keys = random_spans(rng, case.forest.num_tokens)
        _check(replace(case, queries=queries, keys=keys))


@pytest.mark.parametrize(
    ("seed", "count", "max_nodes", "max_length"),
    [
        *((0, 60, 6, 5), (1, 50, 16, 6), (2, 20, 60, 2), (3, 20, 8, 24)),
        pytest.param(1, 1500, 16, 6, marks=pytest.mark.more),
        pytest.param(3, 500, 8, 24, marks=pytest.mark.more),
    ],
)
def test_every_pair_within_a_window_is_computed_once_on_random_forests(
    seed: int, count: int, max_nodes: int, max_length: int
) -> None:
    rng = np.random.default_rng(seed)
    num_cut = num_branched = 0
    for forest in random_forests(seed, count, max_nodes, max_length):
        tile, step = sorted(map(int, rng.integers(1, 9, 2)), reverse=True)
        longest = int(forest.mask().sum(axis=1).max())
        case = replace(_whole(forest, tile, step), window=int(rng.integers(1, longest + 2)))
        schedule = _check(case)
        assert case.window is not None
        assert (len(schedule.start) > 0) == (case.window < longest)
        num_cut += len(schedule.start) > 0
        num_branched += schedule.sweep.num_slots > 0
        queries, keys = random_spans(rng, forest.num_tokens)
        _check(replace(case, queries=queries, keys=keys))
    assert num_cut > count // 2
    assert num_branched > 0


@pytest.mark.parametrize("window", rows((1, 100, 128, 350), now=(1, 128)))
@pytest.mark.parametrize("name", rows(REAL_SIZES, now=("short", "two_trees")))
def test_every_pair_within_a_window_is_computed_once_on_the_kernels_own_grid(
    name: str, window: int
) -> None:
    rng = np.random.default_rng(1)
    case = replace(_of_the_kernels(REAL_SIZES[name]), window=window)
    _check(case)
    for _ in range(2):
        queries, keys = random_spans(rng, case.forest.num_tokens)
        _check(replace(case, queries=queries, keys=keys))


def test_a_window_of_128_over_16k_is_little_work() -> None:
    """Tile pairs, which are what takes time: of a sequence, and of responses to a prompt."""
    for forest in (forest_from([-1], [16384]), star(8192, 8, 1024)):
        tokens = Span(0, forest.num_tokens)
        layout = forest.layout()
        end_T = layout.end_T.numpy()
        full, cut = (
            build_schedule(end_T, tokens, tokens, window) for window in (None, layout.window(128))
        )
        assert cut.sweep.num_slots <= 2
        assert 15 * _num_pairs(cut)[0] < _num_pairs(full)[0]
        assert 15 * _num_pairs(cut)[1] < _num_pairs(full)[1]


def _num_pairs(schedule: Schedule) -> tuple[int, int]:
    """Tile pairs of the forward, and query rows that the backward with dQ sweeps."""
    pieces = schedule.sweep.pieces
    return int(schedule.forward_items[:, 3].sum()), int((pieces[:, 2] - pieces[:, 1]).sum())


def test_fewer_kv_heads_are_cut_finer() -> None:
    """On a forest of so much work that no level's cap is raised to the same by its slots."""
    case = _whole(star(16, 120, 30), 8, 4)
    schedule = case.schedule()
    _check_splits(schedule, case.stride)
    longest = [int((level.pieces[:, 2] - level.pieces[:, 1]).max()) for level in schedule.levels]
    assert longest == sorted(longest, reverse=True)
    assert len(set(longest)) == len(SPLIT_KV_HEADS)
    _, header = schedule.pack()
    expected = {1: 3, 2: 2, 3: 2, 4: 1, 7: 1, 8: 0, 64: 0}
    for num_kv_heads, level in expected.items():
        assert header.level(num_kv_heads) is header.levels[level]


def test_sections_lie_one_behind_the_other() -> None:
    case = _whole(NAMED["two_trees"], 6, 5)
    schedule = case.schedule()
    table, header = schedule.pack()
    widths: list[tuple[Section, int]] = [
        (header.end, 1), (header.runs, 2), (header.forward_items, 4)
    ]  # fmt: skip
    for level in (header.sweep, *header.levels):
        widths += [(level.pieces, 8), (level.split_tiles, 4)]
    for (section, width), (after, _) in itertools.pairwise([*widths, (Section(len(table), 0), 1)]):
        assert 0 <= after.offset - section.offset - section.count * width < 4
    assert (header.num_query_tiles, header.num_key_tiles) == (40, 40)
    assert (header.num_queries, header.num_keys, header.delta) == (240, 240, 0)


def test_delta_is_the_first_query_minus_the_first_key() -> None:
    case = replace(_whole(NAMED["two_trees"], 8, 5), queries=Span(20, 90), keys=Span(35, 240))
    _, header = case.schedule().pack()
    assert (header.num_queries, header.num_keys, header.delta) == (70, 205, -15)
    assert (header.num_query_tiles, header.num_key_tiles) == (9, 26)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [(Span(0, 0), Span(0, 0)), (Span(5, 5), Span(0, 240)), (Span(0, 240), Span(5, 5)),
     (Span(0, 90), Span(100, 240))],
)  # fmt: skip
def test_queries_that_attend_nothing_are_items_without_tiles(queries: Span, keys: Span) -> None:
    case = replace(_whole(NAMED["two_trees"], 8, 5), queries=queries, keys=keys)
    schedule = _check(case)
    num_query_tiles = -(-len(queries) // 8)
    expected = [[tile, 0, 0, 0] for tile in range(num_query_tiles)]
    assert schedule.forward_items.tolist() == expected
    assert all(len(level.pieces) == 0 for level in schedule.levels)


def _edit(column: int, num_steps: int) -> Callable[[IntArray], IntArray]:
    """Edits a column of the backward's pieces of the last level by steps of five rows."""

    def edit(pieces: IntArray) -> IntArray:
        pieces[:, column] += 5 * num_steps
        return pieces

    return edit


def _swap_slots(pieces: IntArray) -> IntArray:
    slot = pieces[:, 3]
    pieces[:, 3] = np.where(slot < 0, -1, slot.max() - slot)
    return pieces


@pytest.mark.parametrize("edit", [
    pytest.param(_edit(1, 1), id="start too late"),
    pytest.param(_edit(2, -1), id="stop too early"),
    pytest.param(_swap_slots, id="slots of other key tiles"),
    pytest.param(_edit(4, -1), id="full from one too early"),
    pytest.param(_edit(4, 1), id="full from one too late"),
    pytest.param(_edit(5, 1), id="full for one too long"),
    pytest.param(_edit(5, -1), id="full for one too short"),
    pytest.param(lambda pieces: np.concatenate((pieces[:1], pieces[:-1])), id="piece dropped"),
])  # fmt: skip
def test_the_twin_finds_a_wrong_piece(edit: Callable[[IntArray], IntArray]) -> None:
    case = _whole(star(70, 4, 24), 8, 5)
    table, header = case.schedule().pack()
    assert header.levels[-1].num_slots > 0
    case.check_pairs(table, header)
    pieces = Twin(table, header, tile=8, step=5).rows(header.levels[-1].pieces, 8)
    pieces[:] = edit(pieces.copy())
    with pytest.raises(AssertionError):
        case.check_pairs(table, header)


@pytest.mark.parametrize("delta", [-1, 1])
def test_the_twin_finds_a_wrong_delta(delta: int) -> None:
    case = replace(_whole(star(70, 4, 24), 8, 5), queries=Span(40, 130), keys=Span(3, 100))
    table, header = case.schedule().pack()
    case.check_pairs(table, header)
    with pytest.raises(AssertionError):
        case.check_pairs(table, replace(header, delta=header.delta + delta))


@pytest.mark.parametrize("row", [0, 1])
def test_the_twin_finds_a_wrong_run(row: int) -> None:
    case = _whole(star(70, 4, 24), 8, 5)
    table, header = case.schedule().pack()
    runs = Twin(table, header, tile=8, step=5).rows(header.runs, 2)
    runs[-1 - row, 1] ^= 1
    with pytest.raises(AssertionError):
        case.check_pairs(table, header)
