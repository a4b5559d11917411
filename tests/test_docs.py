"""The documents against what they name: settings, metrics, messages, and each other."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from typer.main import get_command

from ratoon.cli import cli as service_cli
from ratoon.config import GIB, MIB, OTHER_VARIABLES, RatoonConfig
from ratoon.errors import ErrorCode
from ratoon.metrics import METRICS
from ratoon.model.families import FAMILIES, WRAPPERS
from ratoon.model.spec import PRESET_NAMES
from ratoon.warning_kinds import WarningKind
from ratoon_client.cli.app import cli as client_cli
from ratoon_proto.bases import REPORT_GROUPS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        ROOT / "README.md",
        *ROOT.glob("*/README.md"),
        *ROOT.glob("*/*/README.md"),
        *DOCS.rglob("*.md"),
    ]
)
SOURCES = ("service/src/ratoon", "clients/python/src/ratoon_client", "kernels/src/ratoon_kernels")
SETTINGS = (DOCS / "settings.md").read_text(encoding="utf-8")
OPERATIONS = (DOCS / "operations.md").read_text(encoding="utf-8")


def _rows(text: str, header: str) -> list[list[str]]:
    """Cells of all tables that begin with `header`, in order."""
    tables = [part.split("\n\n")[0].splitlines()[2:] for part in text.split(header)[1:]]
    rows = [row for table in tables for row in table]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, default as it is written) of every setting."""
    for name, field in model.model_fields.items():
        default = field.default
        if isinstance(default, BaseModel):
            yield from _settings(type(default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _written(name, default)


def _written(name: str, default: Any) -> str:
    if default is None:
        return "none"
    if default == "":
        return "empty"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if name.endswith("_bytes") and default:
        unit, size = ("GiB", GIB) if default % GIB == 0 else ("MiB", MIB)
        assert default % size == 0
        return f"{default // size} {unit}"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def test_every_setting_is_listed_with_its_default() -> None:
    documented = [(row[0].strip("`"), row[1]) for row in _rows(SETTINGS, "| setting | default |")]
    own = list(_settings(RatoonConfig))
    assert len(own) > 50
    # Scalars come first in the document as they do in the model.
    assert documented == own
    assert all(row[2] for row in _rows(SETTINGS, "| setting | default |"))


def test_engines_listen_where_the_service_does_not() -> None:
    """Ray's proxy shares its port: the kernel would split requests between it and an engine."""
    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, *ROOT.glob("examples/*.py"))]
    engine = re.compile(r"(?:--port |(?:vllm|sampler)\W.*http://127\.0\.0\.1:)(\d+)", re.IGNORECASE)
    found = [int(port) for text in texts for port in engine.findall(text)]
    assert len(found) > 10
    own = RatoonConfig()
    service = {own.http.port, own.grpc.port, own.serve.http_port}
    assert service.isdisjoint(found)


def test_variables_that_are_no_settings_are_listed() -> None:
    for name in OTHER_VARIABLES:
        assert f"`{name}`" in SETTINGS


def test_every_metric_that_is_named_exists() -> None:
    names = {metric.name for metric in METRICS}
    named = set(re.findall(r"\bratoon_[a-z_]+\b", OPERATIONS))
    # These names are Python packages.
    assert named - names <= {"ratoon_client", "ratoon_kernels", "ratoon_proto"}


@cache
def _anchors(page: Path) -> frozenset[str]:
    """Anchors of the headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return frozenset(heading.replace(" ", "-") for heading in plain)


def _broken_links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        is_there = linked.exists() and (not anchor or anchor in _anchors(linked))
        if not is_there:
            yield f"{page.relative_to(ROOT)}: {target}"


def test_every_link_leads_somewhere() -> None:
    assert len(PAGES) > 20
    assert not [link for page in PAGES for link in _broken_links(page)]


def test_every_alert_leads_to_what_to_do() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text(encoding="utf-8"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) > 10
    for rule in alerts:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        if "ratoon_warnings_total" in rule["expr"]:
            # Every kind has its heading there.
            assert (page, anchor) == ("docs/runbook.md", "{{ $labels.kind }}")
        else:
            assert anchor in {"", *_anchors(ROOT / page)}, rule["alert"]


@cache
def _messages() -> str:
    """All texts of the sources, what is filled in left out."""
    texts: list[str] = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            values = [node.value for node in nodes if isinstance(node, ast.Constant)]
            texts += [value for value in values if isinstance(value, str)]
    return "\n".join(texts)


def test_every_message_of_the_troubleshooting_page_is_one() -> None:
    """Its first column quotes messages, and names codes and fields of reports."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    seen = [row[0] for row in _rows(page, "| you see | cause | do |")]
    assert len(seen) > 30
    quoted = [text for cell in seen for text in re.findall(r"`([^`]+)`", cell)]
    unknown = [text for text in quoted if text not in _messages()]
    assert not unknown
    codes = {code for cell in seen for code in re.findall(r"\b[A-Z]+_[A-Z_]+\b", cell)}
    assert codes <= {str(code) for code in ErrorCode}


def test_the_groups_of_a_report_are_those_of_the_page_on_training() -> None:
    page = (DOCS / "train.md").read_text(encoding="utf-8")
    told = {row[0]: row[1] for row in _rows(page, "| group | figures |")}
    assert told == {
        f"`{group}`": ", ".join(f"`{name}`" for name in names)
        for group, names in REPORT_GROUPS.items()
    }


def test_the_way_through_the_code_names_what_there_is() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = _rows(page, "| steps | names, from the first to the last that is called |")
    told = [name for row in rows for name in re.findall(r"`([^`]+)`", row[1])]
    assert len(told) > 20
    assert not {*told} - _functions()


def _functions() -> set[str]:
    """Functions of the service's modules, and methods behind their class."""
    found: set[str] = set()
    for path in (ROOT / "service/src/ratoon").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.ClassDef):
                methods = (
                    n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
                )
                found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_the_page_of_models_is_what_the_families_say() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "models_page.py"))
    assert script["page"](page) == page
    for name in (*FAMILIES, *WRAPPERS, *PRESET_NAMES):
        assert f"`{name}`" in page


def test_every_kind_of_warning_has_its_heading_in_the_runbook() -> None:
    """And no heading is of a kind that nothing warns of."""
    page = (DOCS / "runbook.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### (.+)$", page, re.MULTILINE)) == sorted(WarningKind)
    code = "".join(path.read_text("utf-8") for path in (ROOT / "service/src").rglob("*.py"))
    for kind in WarningKind:
        assert code.count(f"WarningKind.{kind.name}") >= 1, kind


def _options(command: Any, words: list[str]) -> set[str]:
    """Options that `words`, the start of a command line, may be followed by."""
    found = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    if not hasattr(command, "commands") or not words:
        return found | {"--help"}
    name, *rest = words
    # A word that is none of its commands stands for any of them: `ratoonctl ...`.
    return found | (_options(command.commands[name], rest) if name in command.commands else set())


def test_options_that_documents_name_are_options_of_their_commands() -> None:
    """Red before: `ratoonctl weights follow --receiver-id` was documented, and refused."""
    roots = {"ratoon": get_command(service_cli), "ratoonctl": get_command(client_cli)}
    line = re.compile(r"\b(ratoon|ratoonctl) ((?:[a-z][a-z-]* )+)([^`|#\n]*)")
    num_checked = 0
    for page in PAGES:
        for name, words, rest in line.findall(page.read_text(encoding="utf-8")):
            said = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", f"{rest}"))
            wrong = said - _options(roots[name], words.split())
            assert not wrong, f"{page.name}: {name} {words}{rest}: {sorted(wrong)}"
            num_checked += len(said)
    assert num_checked > 30
