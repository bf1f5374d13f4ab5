"""Writes the parts of Kubernetes' published schemas that `antiphon plan --emit k8s` is tested against.

    python scripts/kubernetes_schemas.py DEFINITIONS LWS_CRD 1.37.0 v0.9.0 > tests/report/data/kubernetes_schemas.json

DEFINITIONS: `_definitions.json` of the package kubernetes-validate (v1.37.0-local-strict), LWS_CRD: the custom resource
definition from kubernetes-sigs/lws. Descriptions are dropped. Of the kinds of volume, probe and so on that nothing here
uses, the name stays and the contents become free: whole, the schemas would have 300 kB.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOTS = {
    "Secret": "io.k8s.api.core.v1.Secret",
    "Service": "io.k8s.api.core.v1.Service",
    "StatefulSet": "io.k8s.api.apps.v1.StatefulSet",
    "PodTemplateSpec": "io.k8s.api.core.v1.PodTemplateSpec",
}
KEPT = {
    *("ObjectMeta", "LabelSelector", "ServiceSpec", "ServicePort", "StatefulSetSpec", "PodSpec", "PodTemplateSpec"),
    *("Secret", "Service", "StatefulSet", "Container", "ContainerPort", "EnvVar", "EnvVarSource", "SecretKeySelector"),
    *("ObjectFieldSelector", "Probe", "HTTPGetAction", "ResourceRequirements", "VolumeMount", "Volume", "IntOrString"),
    *("PersistentVolumeClaimVolumeSource", "Quantity"),
}
FREE: dict[str, Any] = {}


def without_descriptions(value: Any) -> Any:
    if isinstance(value, list):
        return [without_descriptions(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_descriptions(item)
        for key, item in value.items()
        if not (key == "description" and isinstance(item, str)) and not key.startswith("x-kubernetes")
    }


def name_of(reference: str) -> str:
    return reference.rsplit("/", 1)[-1]


def collected(value: Any, definitions: dict[str, Any], found: dict[str, Any]) -> Any:
    """`value` with references into `found`, which gains what they lead to."""
    if isinstance(value, list):
        return [collected(item, definitions, found) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        name = name_of(value["$ref"])
        if name.rsplit(".", 1)[-1] not in KEPT:
            return FREE
        if name not in found:
            found[name] = FREE
            found[name] = collected(definitions[name], definitions, found)
        return {"$ref": f"#/$defs/{name}"}
    return {key: collected(item, definitions, found) for key, item in value.items()}


def strict(schema: Any, pod: dict[str, str]) -> Any:
    """A custom resource's schema without properties that are not named; a pod's template is Kubernetes' own."""
    if isinstance(schema, list):
        return [strict(item, pod) for item in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if isinstance(properties, dict) and "containers" in properties.get("spec", {}).get("properties", {}):
        return pod
    result = {key: strict(item, pod) for key, item in schema.items()}
    return result | {"additionalProperties": False} if isinstance(properties, dict) else result


def main() -> None:
    definitions = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    definitions = without_descriptions(definitions.get("$defs", definitions))
    crd = yaml.safe_load(Path(sys.argv[2]).read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    schemas = {kind: collected({"$ref": name}, definitions, found) for kind, name in ROOTS.items()}
    (version,) = [item for item in crd["spec"]["versions"] if item["name"] == "v1"]
    group = without_descriptions(version["schema"]["openAPIV3Schema"])
    schemas["LeaderWorkerSet"] = strict(group, schemas.pop("PodTemplateSpec"))
    about = {
        "source": f"kubernetes-validate {sys.argv[3]} (PyPI), v{sys.argv[3]}-local-strict; "
        f"kubernetes-sigs/lws {sys.argv[4]}, config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"
    }
    sys.stdout.write(json.dumps({**about, "kinds": schemas, "$defs": found}, indent=None) + "\n")


if __name__ == "__main__":
    main()
