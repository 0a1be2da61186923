"""A published CustomResourceDefinition → the schema with which `kubectl --validate=strict` and the server look at an
object: fields that are not in it are refused, unless it says that they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

KEPT, EITHER = "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"


def schema_of(crd: Path, version: str) -> dict[str, Any]:
    """The strict schema of one version of a definition's file."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = yaml.load(crd.read_text(encoding="utf-8"), Loader=loader)
    [one] = [v for v in found["spec"]["versions"] if v["name"] == version]
    strict_schema: dict[str, Any] = strict(one["schema"]["openAPIV3Schema"])
    return strict_schema


def strict(schema: Any) -> Any:
    """The same as JSON Schema, where an object with properties has no others. `metadata` is Kubernetes' own."""
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key not in ("description", "default", "format")}
    if "properties" in schema:
        found["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        found.setdefault("additionalProperties", bool(schema.get(KEPT, False)))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found[key] = strict(schema[key])
    if schema.get(EITHER):
        found["type"] = ["integer", "string"]
    return found


def disagreements(table: Any, schema: Any, whole: Any, path: str = "") -> list[str]:
    """Where a table of fields (`whole`, with its $defs) says what a published schema does not: a field that it lacks,
    another type, or a required field left out."""
    if "$ref" in table:
        table = whole["$defs"][table["$ref"].rpartition("/")[2]]
    wrong = [
        f"{path}: {name} is required" for name in schema.get("required", ()) if name not in table.get("required", ())
    ]
    for name, inner in table.get("properties", {}).items():
        there = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
        if not isinstance(there, dict):
            wrong += [f"{path}.{name} is not there"] if schema.get("properties") is not None else []
            continue
        if inner.get("type", there.get("type")) != there.get("type"):
            wrong.append(f"{path}.{name} is of type {there.get('type')}")
        wrong += disagreements(inner, there, whole, f"{path}.{name}")
    if isinstance(table.get("items"), dict):
        wrong += disagreements(table["items"], schema["items"], whole, f"{path}[]")
    return wrong
