"""The manifests of deploy/kubernetes, as far as they can be read without a cluster."""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from kubernetes_validate import validate
from ray.serve.schema import ServeDeploySchema

from ratoon.config import LimitsConfig, RatoonConfig, is_loopback

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUBERNETES = "1.37"
NODES = {"matchLabels": {"ray.io/is-ray-node": "yes"}}


def _object(*required: str, **fields: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": fields,
        "required": required,
        "additionalProperties": False,
    }


def _list(item: object) -> dict[str, object]:
    return {"type": "array", "items": item}


_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
# What is in a pod, `validate` checks.
_TEMPLATE = _object(spec={"type": "object"})
# The fields of RayService, ray.io/v1, that the manifest has, as the CRD of KubeRay 1.7.0 has them
# (helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml).
_RAYSERVICE = _object(
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_object(name=_TEXT),
    spec=_object(
        upgradeStrategy=_object(
            type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]}
        ),
        serveConfigV2=_TEXT,
        rayClusterConfig=_object(
            "headGroupSpec",
            rayVersion=_TEXT,
            authOptions=_object(mode={"enum": ["disabled", "token"]}),
            headGroupSpec=_object("template", rayStartParams=_TEXTS, template=_TEMPLATE),
            workerGroupSpecs=_list(
                _object(
                    *("groupName", "maxReplicas", "minReplicas", "template"),
                    groupName=_TEXT,
                    replicas=_NUMBER,
                    minReplicas=_NUMBER,
                    maxReplicas=_NUMBER,
                    rayStartParams=_TEXTS,
                    template=_TEMPLATE,
                )
            ),
        ),
    ),
)


def _read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def _check(manifest: Any) -> None:
    """By Kubernetes' schemas; the pods of a RayService, of which there is none, as pods."""
    if manifest["kind"] != "RayService":
        validate(manifest, KUBERNETES, strict=True)
        return
    cluster = manifest["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
        validate(pod | {"spec": group["template"]["spec"]}, KUBERNETES, strict=True)


def test_manifests_are_what_kubernetes_takes() -> None:
    base = _read("kustomization.yaml")
    names = {path.name for path in FOLDER.iterdir()}
    assert {*base["resources"]} == names - {"kustomization.yaml", "ray-token.yaml"}
    manifests = {name: _read(name) for name in base["resources"]}
    for manifest in manifests.values():
        _check(manifest)
    # What the service's pods name is there.
    cluster = manifests["rayservice.yaml"]["spec"]["rayClusterConfig"]
    pod = cluster["headGroupSpec"]["template"]["spec"]
    claim, secret = manifests["claim.yaml"], manifests["secret.yaml"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (volume,) = pod["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (key,) = [one["valueFrom"] for one in pod["containers"][0]["env"] if "valueFrom" in one]
    name, url = secret["metadata"]["name"], "url"
    assert key == {"secretKeyRef": {"name": name, "key": url}}
    assert secret["stringData"][url].startswith("postgresql://")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("claim", lambda spec: spec.update(accessMode=["ReadWriteMany"])),
        ("networkpolicy", lambda spec: spec["ingress"][1]["ports"][0].update(protocol=6)),
        ("rayservice", lambda spec: _pod(spec).update(terminationGracePeriodSeconds="90")),
        ("rayservice", lambda spec: _pod(spec).update(terminationGracePeriod=90)),
    ],
)
def test_a_manifest_that_kubernetes_does_not_take_is_seen(
    name: str, spoil: Callable[[Any], object]
) -> None:
    manifest = _read(f"{name}.yaml")
    spoil(manifest["spec"])
    with pytest.raises(kubernetes_validate.ValidationError):
        _check(manifest)


def _pod(spec: Any) -> Any:
    return spec["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]


def test_pods_have_the_time_to_drain() -> None:
    """Without it a pod is killed after 30 s, which is what it has for operations alone."""
    cluster = _read("rayservice.yaml")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= LimitsConfig().drain_s + 60


def test_an_overlay_names_image_and_secret(tmp_path: Path) -> None:
    """As the comment of the base has it."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    text = (FOLDER / "kustomization.yaml").read_text(encoding="utf-8")
    lines = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    shutil.copytree(FOLDER, tmp_path / "base")
    (overlay / "kustomization.yaml").write_text("\n".join(lines[:-1]))
    (overlay / "url").write_text("postgresql://me:other@host/name")
    command = [kubectl, "kustomize", str(overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert {each["metadata"]["namespace"] for each in made.values()} == {"training"}
    image = _container(made["RayService"]["spec"]["rayClusterConfig"]["headGroupSpec"])["image"]
    assert image == "registry.example.com/ratoon:0.1.0-cuda"
    assert made["Secret"]["metadata"]["name"] == "ratoon-database"
    assert base64.b64decode(made["Secret"]["data"]["url"]) == b"postgresql://me:other@host/name"


def test_others_reach_ratoons_ports_alone() -> None:
    """A rule without senders lets everybody in, one without ports lets them in everywhere."""
    policy = _read("networkpolicy.yaml")["spec"]
    assert policy["podSelector"] == NODES
    assert policy["policyTypes"] == ["Ingress"]
    nodes, operator, callers, prometheus = policy["ingress"]
    assert nodes == {"from": [{"podSelector": NODES}]}
    for rule in (operator, callers, prometheus):
        assert all(sender.get("podSelector", {}).get("matchLabels") for sender in rule["from"])
    config = RatoonConfig()
    ours = [config.http.port, config.grpc.port]
    assert _ports(callers) == ours
    # Nobody could scrape it: Prometheus is in another namespace, and has no caller's label.
    assert _ports(prometheus) == [config.http.port]
    (sender,) = prometheus["from"]
    assert sender["namespaceSelector"]["matchLabels"]
    assert _ports(operator) == [8265, config.serve.http_port]


def test_the_service_is_what_kuberay_takes() -> None:
    """Fields and types as its CRD has them; one that it has not would be dropped, silently."""
    Draft202012Validator(_RAYSERVICE).validate(_read("rayservice.yaml"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(upgradeStrategy={"typ": "None"}),
        lambda spec: spec["rayClusterConfig"].pop("headGroupSpec"),
        lambda spec: spec["rayClusterConfig"]["authOptions"].update(mode="tokens"),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="2"),
    ],
)
def test_a_manifest_that_kuberay_does_not_take_is_seen(spoil: Callable[[Any], object]) -> None:
    manifest = _read("rayservice.yaml")
    spoil(manifest["spec"])
    with pytest.raises(ValidationError):
        Draft202012Validator(_RAYSERVICE).validate(manifest)


def test_the_service_of_the_cluster_is_ours() -> None:
    spec = _read("rayservice.yaml")["spec"]
    assert spec["upgradeStrategy"] == {"type": "None"}, "two services must not share a folder"
    serve = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    (application,) = serve.applications
    assert application.import_path == "ratoon.app:app_builder"
    config = RatoonConfig(**application.args)
    cluster = spec["rayClusterConfig"]
    for key, value in _read("ray-token.yaml")["spec"].items():
        assert cluster[key] == value
    head, worker = _container(cluster["headGroupSpec"]), _container(cluster["workerGroupSpecs"][0])
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert (ports["http"], ports["grpc"]) == (config.http.port, config.grpc.port)
    assert ports["serve"] == serve.http_options.port == config.serve.http_port
    assert config.auth.required, "left out it would not start before there is a key"
    assert not any(map(is_loopback, (config.http.host, config.grpc.host)))
    for container in (head, worker):
        assert container["image"] == head["image"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
        paths = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
        assert paths == [config.data_root]
    assert worker["resources"]["limits"]["nvidia.com/gpu"]


def test_security_md_and_the_manifests_agree_on_the_dashboard() -> None:
    """It said that there is none beyond loopback, where the manifest bound it to all addresses."""
    cluster = _read("rayservice.yaml")["spec"]["rayClusterConfig"]
    text = " ".join((FOLDER.parents[1] / "docs" / "security.md").read_text("utf-8").split())
    (told,) = [part for part in text.split("**") if part == "KubeRay needs the dashboard."]
    told = text.partition(told)[2].partition(" ## ")[0]
    head, port = cluster["headGroupSpec"], 8265
    assert not is_loopback(head["rayStartParams"]["dashboard-host"])
    ports = {one["name"]: one["containerPort"] for one in _container(head)["ports"]}
    assert ports["dashboard"] == port
    assert f"port {port}" in told
    assert "binds it to all of the head's addresses" in told
    assert cluster["authOptions"] == {"mode": "token"}
    assert "Every route requires the token" in told
    nodes, operator, callers, _ = _read("networkpolicy.yaml")["spec"]["ingress"]
    assert "lets only the operator and nodes of the cluster reach the port" in told
    assert [port in _ports(rule) for rule in (operator, callers)] == [True, False]
    assert nodes == {"from": [{"podSelector": NODES}]}
    assert operator["from"][0]["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/name": "kuberay-operator"
    }


def _ports(rule: Any) -> list[int]:
    return [one["port"] for one in rule["ports"]]


def _container(group: Any) -> Any:
    (container,) = group["template"]["spec"]["containers"]
    return container


def test_the_token_is_for_the_ray_that_is_installed() -> None:
    spec = _read("ray-token.yaml")["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == version("ray")
