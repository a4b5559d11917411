"""What the benchmark of streams is made of: readers that miss no byte, deltas, its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.stream import bare_servers, delta
from benchmarks.stream.main import BEGIN, END, WHAT, _File, _read_http, write_markdown


def test_bare_servers_send_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 5000)
    whole = _File("file", "d", path.stat().st_size, "/", path)
    longer = _File("file", "d", whole.size_bytes + 1, "/", path)
    with bare_servers.serving(path) as (http_port, grpc_port):
        _read_http(http_port, whole)
        bare_servers.read_grpc(grpc_port, "p", whole)
        with pytest.raises(RuntimeError, match="bytes"):
            _read_http(http_port, longer)
        with pytest.raises(RuntimeError, match="bytes"):
            bare_servers.read_grpc(grpc_port, "p", longer)


def test_deltas_are_measured_by_kind_and_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "SHARES", (0.01, 0.5))
    monkeypatch.setattr(delta, "BLOCK_WORDS", 2**16)
    rows = delta.measure(tmp_path, 1, 1, 0)
    assert [(row["kind"], row["share"]) for row in rows] == [
        ("step", 0.01),
        ("step", 0.5),
        ("draw", 0.01),
        ("draw", 0.5),
    ]
    for row in rows:
        assert row["changed_share"] == pytest.approx(row["share"], rel=0.1)
        assert row["bound_percent"] < row["size_percent"] < 60


def test_the_section_has_every_figure(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{BEGIN}\nfrom before\n{END}\nafter\n")
    where: dict[str, Any] = {
        "cores": 2,
        "device": "a machine",
        "versions": {"torch": "2", "ray": "3"},
        "commit": "c" * 40,
        "version_gb": 2.0,
        "reads_gb_s": {"http": [1.0]},
        "deltas": [{"kind": "step", "share": 0.01, "size_percent": 0.6}],
    }
    figures = {name: float(index) for index, name in enumerate(WHAT)}
    write_markdown({**where, **figures}, document, "streams.json")
    text = document.read_text()
    assert all(f"| {what} | {index} |" in text for index, what in enumerate(WHAT.values()))
    assert "| step | 0.01 | 0.6 |" in text
    assert "from before" not in text
