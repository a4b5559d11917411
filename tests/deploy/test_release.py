"""The four distributions as they are published, and what of them `ratoon example` writes."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratoon.cli import cli
from ratoon.example_files import EXAMPLES, write_example
from scripts import release

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All four, built once."""
    folder = tmp_path_factory.mktemp("dist")
    release.build(folder, "", ("--wheel",))
    return sorted(folder.glob("*.whl"))


def test_wheels_are_whole(wheels: list[Path]) -> None:
    names = [path.name.partition("-")[0] for path in wheels]
    assert names == ["ratoon", "ratoon_client", "ratoon_kernels", "ratoon_proto"]
    assert {path.name: list(release.faults(path, "")) for path in wheels} == {
        path.name: [] for path in wheels
    }


def test_what_a_wheel_lacks_is_named(wheels: list[Path], tmp_path: Path) -> None:
    whole, spoilt = wheels[0], tmp_path / wheels[0].name
    left_out = ("ratoon/deploy/alerts.yml", "ratoon/page/main.js", "ratoon/py.typed", "/LICENSE")
    version = f"\nVersion: {release.current()}\n".encode()
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(spoilt, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("/METADATA"):
                content = content.replace(version, b"\nVersion: 9.9\n", 1) + b"[here](docs/api.md)"
            if not name.endswith(left_out):
                target.writestr(name, content)
    found = list(release.faults(spoilt, "https://git.example.com/ratoon"))
    assert found[0] == "version 9.9"
    assert found[1:] == [
        *("no LICENSE", *(f"no {name}" for name in left_out[:3])),
        "Project-URL: None, url 'https://git.example.com/ratoon'",
        "a link of the description: docs/api.md",
    ]


def test_every_example_is_in_the_wheel_and_is_written_whole(
    wheels: list[Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheels[0]) as archive:
        inside = set(archive.namelist())
    for name, example in EXAMPLES.items():
        folder = tmp_path / name
        written = {str(path.relative_to(folder)) for path in write_example(name, folder)}
        assert written == {
            str(Path(path).relative_to(f"ratoon/{example.root}"))
            for path in inside
            if path.startswith(f"ratoon/{example.root}/")
            and any(Path(path).match(f"{example.root}/{each}") for each in example.patterns)
        }
        # What is typed next names files that are there.
        named = re.findall(r"[\w/-]+\.(?:py|jsonl|yml|service)\b", example.then)
        assert {*named} <= written


def test_example_lists_writes_and_overwrites_nothing(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["example", *arguments])
        return done.exit_code, done.output

    code, listed = run()
    assert code == 0
    assert [line.split()[0] for line in listed.splitlines()] == list(EXAMPLES)
    (tmp_path / "case").mkdir()
    mine = tmp_path / "case" / "reward.py"
    mine.write_text("mine")
    code, said = run("grpo", str(tmp_path))
    assert (code, str(mine) in said) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["case"]
    mine.unlink()
    code, said = run("grpo", str(tmp_path))
    assert code == 0
    assert EXAMPLES["grpo"].then in said
    assert mine.read_bytes() == (ROOT / "examples" / "case" / "reward.py").read_bytes()
    assert run("nothing")[0] == 2


def test_the_first_example_is_the_readmes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert (ROOT / "examples" / "first.py").read_text(encoding="utf-8") == code


def test_links_of_a_description_lead_there_from_everywhere() -> None:
    text = (
        "[API](../../docs/api.md#clamps), ![curve](../../docs/images/step.png), [x](https://x.org)"
    )
    folder = ROOT / "clients" / "python"
    linked = release.described(text, folder, "https://git.example.com/r", "v1.0")
    assert linked == (
        "[API](https://git.example.com/r/blob/v1.0/docs/api.md#clamps), "
        "![curve](https://git.example.com/r/raw/v1.0/docs/images/step.png), [x](https://x.org)"
    )
    plain = release.described(text, folder, "", "v1.0")
    assert plain == "API (docs/api.md), curve, [x](https://x.org)"


def test_a_version_moves_everywhere_and_heads_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in release.PARTS:
        (tmp_path / part).mkdir(parents=True)
        shutil.copy(ROOT / part / "pyproject.toml", tmp_path / part)
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## [Unreleased]\n\n### Added\n\n- This.\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "CHANGELOG", changelog)
    assert len(release.versions()) == len(release.PARTS) + 4
    release.move("7.0.0", "2030-01-02")
    assert {*release.versions().values()} == {"7.0.0"}
    text = changelog.read_text()
    assert "## [Unreleased]\n\n## [7.0.0] - 2030-01-02\n" in text
    assert release.notes(text, "7.0.0") == "### Added\n\n- This."
    # Nothing is new, and an older one is none.
    for version in ("7.1.0", "6.9.9"):
        with pytest.raises(SystemExit):
            release.move(version, "2030-01-03")
    assert {*release.versions().values()} == {"7.0.0"}
    pins = tmp_path / "service" / "pyproject.toml"
    pins.write_text(pins.read_text().replace("ratoon-proto==7.0.0", "ratoon-proto==7.0.1"))
    with pytest.raises(SystemExit, match="versions differ"):
        release.current()
