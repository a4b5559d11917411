#!/usr/bin/env python3
"""Builds the four distributions as they are published, checks them, and moves their version.

    python scripts/release.py version 0.2.0        # writes it: pyproject files, CHANGELOG.md
    python scripts/release.py build [--url URL]    # sdists and wheels, checked, into dist/
    python scripts/release.py notes [VERSION]      # its section of CHANGELOG.md

A build is made of a copy, so nothing of an earlier one gets into it, and needs no network: its
setuptools is the environment's own. The description of `ratoon` is the project's README.md, those
of the others their own. Links of a description lead to the release's tag below URL, where the
sources are published; without URL they become plain text.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email import message_from_bytes
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[1]
DIST, CHANGELOG = ROOT / "dist", ROOT / "CHANGELOG.md"
UNRELEASED = "## [Unreleased]\n"
# Folder of each distribution: its description.
PARTS = {
    "proto": "proto/README.md",
    "kernels": "kernels/README.md",
    "clients/python": "clients/python/README.md",
    "service": "README.md",
}
# What a program of a distribution reads beside its modules, of which a build leaves out what
# `package-data` of its pyproject.toml does not name.
CONTENTS = {
    "ratoon-proto": ("ratoon_proto/ratoon/v1/service.proto", "ratoon_proto/v1/comments.json"),
    "ratoon-kernels": ("ratoon_kernels/tree_attention/csrc/forward.cu",),
    "ratoon-client": (),
    "ratoon": (
        *("ratoon/page/index.html", "ratoon/examples/grpo.py", "ratoon/examples/case/reward.py"),
        *("ratoon/deploy/alerts.yml", "ratoon/deploy/grafana/ratoon.json"),
    ),
}
# Made when it runs, pages on the code, and files for operators, of which `package-data` has some.
_LEFT_OUT = {"__pycache__", "cubins", "README.md", "deploy"}
_TARGET = re.compile(r"\]\(([^)\s]+)\)")
# The label may be an image, which is a link of its own.
_LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)\s]+\)|[^\]])*)\]\(([^)\s]+)\)")


def versions() -> dict[str, str]:
    """Versions of the distributions and of those that they require of each other, by where."""
    found: dict[str, str] = {}
    for part in PARTS:
        for line in (ROOT / part / "pyproject.toml").read_text(encoding="utf-8").splitlines():
            if place := re.search(r'^version = "([^"]+)"|"(ratoon-\w+)==([^"]+)"', line):
                found[f"{part} {place[2] or ''}".rstrip()] = place[1] or place[3]
    return found


def current() -> str:
    """The version of all four distributions. Raises SystemExit where they differ."""
    found = versions()
    if len({*found.values()}) != 1:
        sys.exit(f"versions differ: {found}")
    return found["service"]


def move(version: str, today: str) -> None:
    """Make `version` the current one, and what is unreleased in CHANGELOG.md its section."""
    old = current()
    text = CHANGELOG.read_text(encoding="utf-8")
    if Version(version) < Version(old) or notes(text, version):
        sys.exit(f"version: got {version}, expected one that CHANGELOG.md lacks, from {old} on")
    if not notes(text, "Unreleased"):
        sys.exit("CHANGELOG.md: nothing is unreleased")
    for part in PARTS:
        path = ROOT / part / "pyproject.toml"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        own = re.compile(rf'(^version = "|"ratoon-\w+==){re.escape(old)}"')
        path.write_text("".join(own.sub(rf'\g<1>{version}"', line) for line in lines), "utf-8")
    CHANGELOG.write_text(
        text.replace(UNRELEASED, f"{UNRELEASED}\n## [{version}] - {today}\n", 1), "utf-8"
    )


def notes(changelog: str, version: str) -> str:
    """The text below the heading of a version; "" where there is none."""
    _, _, rest = changelog.partition(f"\n## [{version}]")
    return rest.partition("\n")[2].partition("\n## [")[0].strip()


def described(text: str, folder: Path, url: str, tag: str) -> str:
    """A description whose links, which start from `folder`, lead there from everywhere."""

    def linked(found: re.Match[str]) -> str:
        image, label, target = found[1], _LINK.sub(linked, found[2]), found[3]
        path, mark, anchor = target.partition("#")
        if "://" in target or not path:
            return f"{image}[{label}]({target})"
        place = (folder / path).resolve().relative_to(ROOT).as_posix()
        if not url:
            return label if image or label.strip("`").startswith(place) else f"{label} ({place})"
        return f"{image}[{label}]({url}/{'raw' if image else 'blob'}/{tag}/{place}{mark}{anchor})"

    return _LINK.sub(linked, text)


def copy(part: str, folder: Path, url: str, version: str) -> None:
    """Copy the sources of a distribution, its links as what they lead to."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", "cubins")
    shutil.copytree(ROOT / part, folder, ignore=ignored)
    readme = ROOT / PARTS[part]
    text = described(readme.read_text(encoding="utf-8"), readme.parent, url, f"v{version}")
    (folder / "README.md").write_text(text, "utf-8")
    if url:
        project = folder / "pyproject.toml"
        links = {"Source": "", "Changelog": f"/blob/v{version}/CHANGELOG.md", "Issues": "/issues"}
        lines = "".join(f'{name} = "{url}{path}"\n' for name, path in links.items())
        project.write_text(f"{project.read_text(encoding='utf-8')}\n[project.urls]\n{lines}")


def build(out: Path, url: str, kinds: Iterable[str] = ()) -> None:
    """Build all distributions into a folder; `kinds`: ("--wheel",) for wheels alone.

    An sdist comes first, and the wheel is built from it. Times of their files are the commit's.
    """
    version = current()
    commit = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    asked = subprocess.run(commit, capture_output=True, text=True, check=True)
    dated = ("env", f"SOURCE_DATE_EPOCH={asked.stdout.strip()}")
    with tempfile.TemporaryDirectory() as scratch:
        for part in PARTS:
            folder = Path(scratch) / part
            copy(part, folder, url, version)
            command = (*dated, sys.executable, "-m", "build", "--no-isolation", *kinds)
            done = subprocess.run(
                [*command, "--outdir", str(out), str(folder)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(f"{part}: {done.stdout[-4000:]}{done.stderr[-4000:]}")


def faults(wheel: Path, url: str) -> Iterator[str]:
    """Say what a wheel lacks, and which links of its description lead nowhere."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in inside if ".dist-info/" in name}
        meta = message_from_bytes(archive.read(f"{info}/METADATA"))
        license_path = f"{info}/licenses/LICENSE"
        licensed = archive.read(license_path) if license_path in inside else b""
    name, part = meta["Name"], _part_of(meta["Name"])
    if meta["Version"] != current():
        yield f"version {meta['Version']}"
    if licensed != (ROOT / "LICENSE").read_bytes():
        yield "no LICENSE"
    for missing in sorted({*CONTENTS[name], *_sources(part)} - inside):
        yield f"no {missing}"
    for field in ("Summary", "License-Expression", "Classifier", "Requires-Python"):
        if field not in meta:
            yield f"no {field}"
    if bool(url) != ("Project-URL" in meta):
        yield f"Project-URL: {meta.get_all('Project-URL')}, url {url!r}"
    for target in _TARGET.findall(str(meta.get_payload())):
        if "://" not in target and not target.startswith("#"):
            yield f"a link of the description: {target}"


def _part_of(name: str) -> str:
    (part,) = [
        part
        for part in PARTS
        if f'\nname = "{name}"\n' in (ROOT / part / "pyproject.toml").read_text(encoding="utf-8")
    ]
    return part


def _sources(part: str) -> Iterator[str]:
    """Files of a distribution's packages, below `src`."""
    source = ROOT / part / "src"
    for folder, names, files in os.walk(source, followlinks=True):
        names[:] = [name for name in names if not (name in _LEFT_OUT or name.endswith(".egg-info"))]
        for name in {*files} - _LEFT_OUT:
            yield (Path(folder) / name).relative_to(source).as_posix()


def check(out: Path, url: str) -> None:
    """Check what is in a folder. Raises SystemExit with all that is wrong."""
    found: list[str] = []
    wheels, sdists = sorted(out.glob("*.whl")), sorted(out.glob("*.tar.gz"))
    if len(wheels) != len(PARTS) or len(sdists) != len(PARTS):
        found.append(f"{len(wheels)} wheels and {len(sdists)} sdists, of {len(PARTS)}")
    for wheel in wheels:
        found += [f"{wheel.name}: {fault}" for fault in faults(wheel, url)]
    for sdist in sdists:
        with tarfile.open(sdist) as archive:
            if any(member.issym() or member.islnk() for member in archive):
                found.append(f"{sdist.name}: a link, which has no target elsewhere")
    rendered = [sys.executable, "-m", "twine", "check", "--strict", *wheels, *sdists]
    done = subprocess.run(rendered, capture_output=True, text=True, check=False)
    found += [done.stdout + done.stderr] if done.returncode else []
    if found:
        sys.exit("\n".join(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version").add_argument("version")
    commands.add_parser("notes").add_argument("version", nargs="?")
    commands.add_parser("build").add_argument("--url", default="")
    arguments = parser.parse_args()
    match arguments.command:
        case "version":
            move(str(Version(arguments.version)), f"{datetime.now(UTC):%Y-%m-%d}")
        case "notes":
            version = arguments.version or current()
            text = notes(CHANGELOG.read_text(encoding="utf-8"), version)
            print(text or sys.exit(f"CHANGELOG.md has no {version}"))
        case _:
            url = arguments.url.rstrip("/")
            shutil.rmtree(DIST, ignore_errors=True)
            build(DIST, url)
            check(DIST, url)
            for path in sorted(DIST.iterdir()):
                print(f"{path.stat().st_size / 2**10:8,.0f} KiB  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
