"""The image, its compose file and the unit for systemd, as far as they can be read without a
container."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]
SCHEMAS = files("check_jsonschema") / "builtin_schemas" / "vendor"


def _compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_image_runs_as_a_user_with_a_healthcheck() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER (?!root\b|0\b)\S+", dockerfile, re.MULTILINE)
    assert "HEALTHCHECK" in dockerfile
    assert "deploy/install.sh /opt/ratoon" in dockerfile


def test_images_are_named_by_digest() -> None:
    """A tag is whatever its owner says today."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    services = _compose()["services"].values()
    named = [service["image"] for service in services if "image" in service]
    named += re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile, re.MULTILINE)
    assert len(named) == 4
    for image in named:
        assert re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", image), image
    bases = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
    assert set(bases) == {"${PYTHON_IMAGE}"}


def read_lock(name: str) -> dict[str, str]:
    """Versions by package, each of which has a digest."""
    locked: dict[str, str] = {}
    with_digest: set[str] = set()
    package = ""
    for line in (ROOT / "deploy" / name).read_text().splitlines():
        if found := re.match(r"([a-z0-9-]+)==(\S+)", line):
            package = found[1]
            locked[package] = found[2]
        elif re.match(r" +--hash=sha256:[0-9a-f]{64}( |$)", line):
            with_digest.add(package)
        else:
            assert line.startswith("#"), line
    assert with_digest == locked.keys()
    return locked


def test_what_an_image_installs_is_named_by_digest() -> None:
    """At the versions that the tests run on."""
    locked = read_lock("torch.lock") | read_lock("requirements.lock")
    pins = re.findall(r"^([^#=\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-"): version for name, version in pins}
    assert {"torch", "ray", "transformers", "fastapi", "grpcio"} <= pinned.keys() & locked.keys()
    assert all(locked[name] == pinned[name] for name in pinned.keys() & locked.keys())
    install = (ROOT / "deploy" / "install.sh").read_text()
    assert install.count("--require-hashes") == 2


def test_an_image_for_gpus_has_a_c_compiler() -> None:
    """Triton builds a C module at run time: without gcc nothing that it compiles could run."""
    _, final = (ROOT / "Dockerfile").read_text().split("FROM ${PYTHON_IMAGE}\n")
    assert "ARG DEVICE=cpu\n" in final
    only_cuda = r'RUN if \[ "\$\{DEVICE\}" = cuda \]; then.*?\bgcc libc6-dev\b.*?fi\n'
    assert re.search(only_cuda, final, re.DOTALL)
    # Before the user changes to one who may not install.
    assert final.index("apt-get install") < final.index("USER ratoon")


def test_an_image_keeps_what_is_compiled_on_its_volume() -> None:
    """A new container would compile all of it again before a policy goes on."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    volume = re.search(r"^VOLUME (\S+)$", dockerfile, re.MULTILINE)
    assert volume
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert re.search(rf"^ +{name}={volume[1]}/\S+", dockerfile, re.MULTILINE), name


def test_compose_gives_the_service_time_to_drain() -> None:
    """It was killed after 30 s, which is what it has for operations alone."""
    from ratoon.config import LimitsConfig

    for name in ("ratoon", "ratoon-gpu"):
        grace = _compose()["services"][name]["stop_grace_period"]
        assert int(grace.removesuffix("s")) >= LimitsConfig().drain_s + 60


def test_image_context_holds_all_that_the_dockerfile_copies() -> None:
    """A file missing from .dockerignore would break a build that no test here can run."""
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = re.findall(r"^COPY (?!--from)(\S+) ", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert copied
    for source in copied:
        assert {source, source.partition("/")[0]} & allowed
        assert (ROOT / source).exists()


def test_compose_is_what_the_specification_takes() -> None:
    schema = Draft202012Validator(json.loads((SCHEMAS / "compose-spec.json").read_text("utf-8")))
    schema.validate(_compose())
    for key in ("profile", "stop_grace"):
        spoilt = _compose()
        spoilt["services"]["ratoon"][key] = "90s"
        assert not schema.is_valid(spoilt), key


def test_compose_starts_one_service_whatever_is_beside_it() -> None:
    """The second would have its ports, and its folder."""
    services = _compose()["services"]
    profiles = {name: service["profiles"] for name, service in services.items()}
    assert profiles == {
        "ratoon": ["cpu"],
        "ratoon-gpu": ["gpu"],
        "postgres": ["postgres"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
    }
    settings = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", (ROOT / ".env").read_text(), re.MULTILINE))
    assert settings["COMPOSE_PROFILES"] == "cpu"
    database = services["postgres"]["environment"]
    given = urlsplit(settings["RATOON_DATABASE_URL"])
    assert (given.hostname, given.port, given.path) == ("postgres", 5432, "/ratoon")
    assert (given.username, given.password) == (database["POSTGRES_USER"], "ratoon")
    assert database["POSTGRES_PASSWORD"].endswith(f":-{given.password}}}")
    cpu, gpu = services["ratoon"], services["ratoon-gpu"]
    assert [each["build"]["args"]["DEVICE"] for each in (cpu, gpu)] == ["cpu", "cuda"]
    for each in (cpu, gpu):
        # None: only where .env or the environment has it.
        assert each["environment"]["RATOON_DATABASE_URL"] is None
        assert each["depends_on"]["postgres"]["required"] is False
        (models,) = [one for one in each["volumes"] if isinstance(one, dict)]
        dockerfile = (ROOT / "Dockerfile").read_text()
        assert f"RATOON_MODELS_ROOT={models['target']} " in dockerfile
        assert models["read_only"]
    assert "deploy" not in cpu
    # Prometheus finds either by one name.
    assert gpu["networks"]["default"]["aliases"] == ["ratoon"]


def test_compose_scrapes_the_service_on_loopback_ports() -> None:
    for service in _compose()["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        # Files that a container mounts are there.
        named = [part for part in service["volumes"] if isinstance(part, str)]
        mounted = [part.split(":")[0] for part in named if part.startswith("./")]
        assert all((ROOT / path).is_file() for path in mounted)
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["ratoon:8000"]}]
    grafana = yaml.safe_load((ROOT / "deploy" / "grafana" / "datasources.yml").read_text())
    (source,) = grafana["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")


def test_compose_lets_no_web_page_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are off there: a page whose name is made 127.0.0.1 was an admin."""
    from ratoon.auth.access import checked_hosts
    from ratoon.config import load_config

    for name, value in _compose()["services"]["ratoon"]["environment"].items():
        if value is not None:
            monkeypatch.setenv(name, value)
    config = load_config(ROOT / "deploy" / "ratoon.yaml")
    assert config.auth.required is False
    # The name by which Prometheus calls it.
    assert checked_hosts(config) == ("ratoon",)


def _unit() -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser(strict=False, delimiters="=")
    unit.optionxform = lambda optionstr: optionstr
    unit.read_string((ROOT / "deploy" / "ratoon.service").read_text())
    return unit


def test_the_unit_lets_the_service_drain_and_survive_its_workers() -> None:
    from ratoon.config import LimitsConfig

    service = _unit()["Service"]
    assert int(service["TimeoutStopSec"]) >= LimitsConfig().drain_s + 60
    # Ray's processes end after the service that drains with their help; a worker that the kernel
    # killed ended it.
    assert (service["KillMode"], service["OOMPolicy"]) == ("mixed", "continue")
    assert service["Restart"] == "on-failure"
    assert service["ExecStart"].endswith("/bin/ratoon serve --config /etc/ratoon/ratoon.yaml")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (ROOT / "deploy" / "ratoon.service").read_text()
    text = text.replace(_unit()["Service"]["ExecStart"].split()[0], "/bin/true")
    # It says nothing of a unit that is well, and exits 0 where it ignores a key.
    for spoilt, said in ((text, ""), (text.replace("KillMode=", "KillMod="), "Unknown key")):
        path = tmp_path / "ratoon.service"
        path.write_text(spoilt)
        command = [analyze, "verify", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stderr
        assert bool(done.stderr) == bool(said), done.stderr


def test_deploy_settings_are_valid() -> None:
    from ratoon.config import load_config

    config = load_config(ROOT / "deploy" / "ratoon.yaml")
    assert config.http.host == "0.0.0.0"
    assert not config.serve.is_on
    serve = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    (application,) = serve["applications"]
    assert application["import_path"] == "ratoon.app:app_builder"
