"""The manifests agree with the agent: names, options, rights; the examples' claims are allocated and prepared.

With a new `kubernetes` client from PyPI (scripts/check-manifests) they are also held against its models; Debian's does not know
resource.k8s.io/v1 yet.
"""
import copy
import json
import pathlib
import re
import shutil
import subprocess

import pytest
import yaml

from cluster import ApiServer, Scheduler, check_slice
from conftest import DRIVER, TOOL
from gpushare_kubernetes.__main__ import check, parser
from gpushare_kubernetes.dra import slice_of
from gpushare_kubernetes.gangs import parser as gangs_parser
from gpushare_kubernetes.inventory import Device

FOLDER = pathlib.Path(__file__).parent.parent / "manifests"
CHART = FOLDER.parent / "helm" / "gpushare"
DOCUMENTS = [(path.name, document) for path in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


def of_kind(kind):
    return [document for _, document in DOCUMENTS if document["kind"] == kind]


def test_the_agent_s_command_is_right():
    containers = {container["name"]: container for container in of_kind("DaemonSet")[0]["spec"]["template"]["spec"]["containers"]}
    command = containers["agent"]["command"]
    assert command[0] == "gpushare-kubernetes-agent"
    options = parser().parse_args(command[1:] + ["--node", "from NODE_NAME"])
    assert check(options) is None
    assert str(options.socket) in containers["daemon"]["command"]
    mounted = [mount["mountPath"] for mount in containers["agent"]["volumeMounts"]]
    for needed in (options.socket.parent, options.cdi_dir, options.kubelet_dir / "plugins", options.kubelet_dir / "plugins_registry",
                   options.kubelet_dir / "device-plugins", options.share_dir):
        assert str(needed) in mounted
    # Paths are the same on the host and in the container: the kubelet and CDI files name them.
    for volume in of_kind("DaemonSet")[0]["spec"]["template"]["spec"]["volumes"]:
        assert volume["hostPath"]["path"] in mounted
    project = (FOLDER.parent.parent.parent / "pyproject.toml").read_text()
    assert 'gpushare-kubernetes-agent = "gpushare_kubernetes.__main__:main"' in project


def rendered(values):
    """The chart's documents. Templates use little of Go's language: values, `if` of a value, and toYaml with indent. `helm` itself, where it is there,
    has to say the same (scripts/check-manifests)."""
    def value(path):
        found = values if path.startswith(".Values.") else {"Release": {"Namespace": "gpushare"}}
        for part in path.removeprefix(".Values.").removeprefix(".").split("."):
            found = found[part]
        return found

    def render(text):
        found = 1
        while found:  # from the innermost outwards
            text, found = re.subn(r"(?:^|\n)\{\{- if (\S+) \}\}((?:(?!\{\{- if ).)*?)\n\{\{- end \}\}", lambda m: m.group(2) if value(m.group(1)) else "", text, flags=re.S)

        def insert(match):
            expression = match.group(1)
            if expression.startswith("toYaml "):
                path, indent = re.fullmatch(r"toYaml (\S+) \| indent (\d+)", expression).groups()
                return "\n".join(" " * int(indent) + line for line in yaml.safe_dump(value(path)).strip().split("\n"))
            return str(value(expression))

        return re.sub(r"\{\{ (.*?) \}\}", insert, text)

    return [document for path in sorted((CHART / "templates").glob("*.yaml")) for document in yaml.safe_load_all(render(path.read_text()))]


def test_the_chart_makes_the_manifests():
    """The manifests are its golden files; Helm makes the namespace."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for enabled, files in ((False, ("agent.yaml", "device-class.yaml")), (True, ("agent.yaml", "device-class.yaml", "gangs.yaml"))):
        values["gangs"]["enabled"] = enabled
        made = rendered(values)
        for document in made:
            if document["kind"] in ("DaemonSet", "Deployment"):
                for container in document["spec"]["template"]["spec"]["containers"]:
                    assert container.pop("imagePullPolicy") == "IfNotPresent"
        assert made == [document for name, document in DOCUMENTS if name in files and document["kind"] != "Namespace"]
    values["image"].update(repository="registry.example/gpushare", pullSecrets=[{"name": "key"}])
    values["runtimeClassName"] = "nvidia"
    values["daemon"].update(metricsPort=9000)
    daemon = next(document for document in rendered(values) if document["kind"] == "DaemonSet")["spec"]["template"]["spec"]["containers"][0]
    assert daemon["command"][-1] == "0.0.0.0:9000" and daemon["ports"] == [{"name": "metrics", "containerPort": 9000}]
    values["daemon"].update(device="host", metricsPort=0, extraArgs=["--policy", "priority"])
    values["agent"]["extraArgs"] = ["--cdi-device", "nvidia.com/gpu={index}"]
    values["gangs"]["extraArgs"] = ["--interval", "5"]
    spec, gangs = (next(document for document in rendered(values) if document["kind"] == kind)["spec"]["template"]["spec"] for kind in ("DaemonSet", "Deployment"))
    assert (spec["runtimeClassName"], spec["imagePullSecrets"]) == ("nvidia", [{"name": "key"}])
    daemon, agent = spec["containers"]
    assert daemon["command"][5:] == ["--device", "host", "--policy", "priority"] and "ports" not in daemon
    assert (daemon["image"], agent["command"][3:]) == ("registry.example/gpushare:1.0.0", ["--cdi-device", "nvidia.com/gpu={index}"])
    assert gangs["imagePullSecrets"] == [{"name": "key"}]
    controller = gangs["containers"][0]
    assert controller["image"] == "registry.example/gpushare:1.0.0"
    assert gangs_parser().parse_args(controller["command"][3:]).interval == 5


def test_helm_makes_the_same():
    if not shutil.which("helm"):
        pytest.skip("no helm")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    key = lambda document: (document["kind"], document["metadata"]["name"])
    for enabled in ("false", "true"):
        made = subprocess.run(["helm", "template", "gpushare", CHART, "--namespace", "gpushare", "--set", f"gangs.enabled={enabled}"], capture_output=True, text=True, check=True).stdout
        values["gangs"]["enabled"] = enabled == "true"
        assert sorted(filter(None, yaml.safe_load_all(made)), key=key) == sorted(rendered(values), key=key)


def test_the_daemon_serves_gpus_or_nothing():
    daemon = of_kind("DaemonSet")[0]["spec"]["template"]["spec"]["containers"][0]
    assert daemon["command"][daemon["command"].index("--device") + 1] == "all" and "--all-users" in daemon["command"]
    done = subprocess.run([TOOL, "devices", "--json", "-"], capture_output=True, text=True, check=True)
    if any(device["usable"] and device["spec"] not in ("host", "sim") for device in json.loads(done.stdout)["devices"]):
        pytest.skip("there is a GPU")
    done = subprocess.run([TOOL, "daemon", "--all-users", "--socket", "/nonexistent/socket", "--device", "all"], capture_output=True, text=True)
    assert done.returncode == 3 and "no GPU can be used" in done.stderr


def test_the_role_allows_what_the_agent_calls(dra, api, kubelet, scheduler):
    """And nothing else: every right is used by one of the API's methods."""
    claim = scheduler.allocate("a", DRIVER, ("gpu", {"memory": "16Mi"}))
    kubelet.prepare(DRIVER, claim)
    rights = {(resource, verb) for rule in of_kind("ClusterRole")[0]["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    used = set()
    for verb, path in api.calls:
        found = re.search(r"/(nodes|resourceslices|resourceclaims)(/|$)", path)
        if found:
            used.add((found.group(1), {"GET": "get", "POST": "create", "PUT": "update", "DELETE": "delete"}[verb]))
    assert used <= rights
    assert rights - used <= {("resourceslices", "update"), ("resourceslices", "delete")}  # test_dra.py has these


def test_names_agree():
    assert of_kind("DeviceClass")[0]["metadata"]["name"] == DRIVER == parser().get_default("driver")
    for entry, kind in zip(of_kind("DeviceClass"), ("gpu", "host")):
        assert entry["spec"]["selectors"][0]["cel"]["expression"] == f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].type == "{kind}"'
    plugin_pod = next(document for name, document in DOCUMENTS if name == "example-device-plugin.yaml")
    assert list(plugin_pod["spec"]["containers"][0]["resources"]["limits"]) == [f"{DRIVER}/share"]


def test_the_examples_claims_share_a_device_of_16_gib():
    api = ApiServer()
    try:
        entry = slice_of("node-1", DRIVER, [Device("cuda-0", "cuda:0", 16 << 30)], 1, 64 << 20, 5, 10)
        assert check_slice(entry) is None
        api.slices["node-1"] = entry
        scheduler = Scheduler(api)
        templates = {template["metadata"]["name"]: template["spec"]["spec"] for template in of_kind("ResourceClaimTemplate")}
        for pod in of_kind("Pod"):
            for claim in pod["spec"].get("resourceClaims", []):
                for request in templates[claim["resourceClaimTemplateName"]]["devices"]["requests"]:
                    assert request["exactly"]["deviceClassName"] == DRIVER
                    scheduler.allocate(pod["metadata"]["name"], DRIVER, (request["name"], request["exactly"]["capacity"]["requests"]))
        assert scheduler.consumed("node-1", "cuda-0") == {"memory": 12 << 30, "share": 100}
    finally:
        api.stop()


def test_slices_that_a_server_would_refuse_are_found_by_our_checker():
    good = slice_of("node-1", DRIVER, [Device("a", "a", 1 << 30), Device("tiny", "tiny", 100)], 1, 64 << 20, 5, 10)
    assert [device["name"] for device in good["spec"]["devices"]] == ["a"]  # less than a step is not offered
    assert check_slice(good) is None
    for path, value in [(("name",), "A_b"), (("allowMultipleAllocations",), False), (("other",), 1),
                        (("capacity", "memory", "requestPolicy", "default"), "1"),
                        (("capacity", "memory", "requestPolicy", "validRange", "max"), "2Gi"),
                        (("capacity", "share", "requestPolicy", "validRange", "step"), "30")]:
        bad = copy.deepcopy(good)
        place = bad["spec"]["devices"][0]
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value
        assert check_slice(bad), path


def test_the_client_s_models_take_the_manifests():
    client = pytest.importorskip("kubernetes.client", reason="scripts/check-manifests runs this with a client from PyPI")
    if not hasattr(getattr(client, "V1ResourceSlice", None), "model_validate"):
        pytest.skip("this client's models do not know resource.k8s.io/v1, or do not check")
    golden = yaml.safe_load((pathlib.Path(__file__).parent / "golden" / "resourceslice.json").read_text())
    for document in [golden, *(document for _, document in DOCUMENTS)]:
        getattr(client, "V1" + document["kind"]).model_validate(document)
    golden["spec"]["devices"][0]["capacity"]["memory"]["requestPolicy"]["validRanges"] = {}
    with pytest.raises(ValueError, match="validRanges"):  # the models find what they must
        client.V1ResourceSlice.model_validate(golden)
