"""The kubelet's messages, described by hand: names, types and field numbers of three of its APIs.

They are wire compatible with the kubelet's files pluginregistration/v1, dra/v1 and deviceplugin/v1beta1, as far as the agent uses
them; protobuf skips fields that it does not know. Describing them here needs no code generator at build time, and works with every
version of protobuf's Python package.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import types
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {"string": _FIELD.TYPE_STRING, "bool": _FIELD.TYPE_BOOL, "int32": _FIELD.TYPE_INT32, "int64": _FIELD.TYPE_INT64}


def _describe(package: str, **messages: dict[str, Any]) -> types.SimpleNamespace:
    """Message classes of `package`. A field is `name=(number, type)`; a type is a scalar's or a message's name, `[type]` a list of it,
    `{"string": type}` a map."""
    file = descriptor_pb2.FileDescriptorProto(name=f"gpushare/{package}.proto", package=package, syntax="proto3")
    for message_name, fields in messages.items():
        message = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
            if isinstance(kind, list):
                field.label, kind = _FIELD.LABEL_REPEATED, kind[0]
            elif isinstance(kind, dict):  # a map is a list of entries, each a message of its own
                entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
                entry.options.map_entry = True
                for part, part_number, part_kind in (("key", 1, "string"), ("value", 2, kind["string"])):
                    _set_type(entry.field.add(name=part, number=part_number, label=_FIELD.LABEL_OPTIONAL), package, part_kind)
                field.label, kind = _FIELD.LABEL_REPEATED, f"{message_name}.{entry.name}"
            _set_type(field, package, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    result = types.SimpleNamespace()
    for name in messages:
        descriptor = pool.FindMessageTypeByName(f"{package}.{name}")
        if hasattr(message_factory, "GetMessageClass"):
            made = message_factory.GetMessageClass(descriptor)
        else:  # protobuf before 4.22
            made = message_factory.MessageFactory(pool).GetPrototype(descriptor)
        setattr(result, name, made)
    return result


def _set_type(field: Any, package: str, kind: str) -> None:
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{package}.{kind}"


# kubelet/pkg/apis/pluginregistration/v1: the kubelet finds a plugin's socket and asks it who it is.
registration = _describe(
    "pluginregistration",
    InfoRequest={},
    PluginInfo={"type": (1, "string"), "name": (2, "string"), "endpoint": (3, "string"), "supported_versions": (4, ["string"])},
    RegistrationStatus={"plugin_registered": (1, "bool"), "error": (2, "string")},
    RegistrationStatusResponse={},
)
REGISTRATION_SERVICE = "pluginregistration.Registration"

# kubelet/pkg/apis/dra/v1: the kubelet has claims prepared before the containers of a pod start, and unprepared after the last has ended.
dra = _describe(
    "k8s.io.kubelet.pkg.apis.dra.v1",
    Claim={"namespace": (1, "string"), "uid": (2, "string"), "name": (3, "string")},
    Device={"request_names": (1, ["string"]), "pool_name": (2, "string"), "device_name": (3, "string"), "cdi_device_ids": (4, ["string"])},
    NodePrepareResourcesRequest={"claims": (1, ["Claim"])},
    NodePrepareResourceResponse={"devices": (1, ["Device"]), "error": (2, "string")},
    NodePrepareResourcesResponse={"claims": (1, {"string": "NodePrepareResourceResponse"})},
    NodeUnprepareResourcesRequest={"claims": (1, ["Claim"])},
    NodeUnprepareResourceResponse={"error": (1, "string")},
    NodeUnprepareResourcesResponse={"claims": (1, {"string": "NodeUnprepareResourceResponse"})},
)
DRA_SERVICE = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
DRA_VERSION = "v1.DRAPlugin"  # as a plugin's registration names it

# kubelet/pkg/apis/deviceplugin/v1beta1.
plugin = _describe(
    "v1beta1",
    Empty={},
    DevicePluginOptions={"pre_start_required": (1, "bool"), "get_preferred_allocation_available": (2, "bool")},
    RegisterRequest={"version": (1, "string"), "endpoint": (2, "string"), "resource_name": (3, "string"),
                     "options": (4, "DevicePluginOptions")},
    Device={"ID": (1, "string"), "health": (2, "string")},
    ListAndWatchResponse={"devices": (1, ["Device"])},
    ContainerPreferredAllocationRequest={"available_deviceIDs": (1, ["string"]), "must_include_deviceIDs": (2, ["string"]),
                                         "allocation_size": (3, "int32")},
    PreferredAllocationRequest={"container_requests": (1, ["ContainerPreferredAllocationRequest"])},
    ContainerPreferredAllocationResponse={"deviceIDs": (1, ["string"])},
    PreferredAllocationResponse={"container_responses": (1, ["ContainerPreferredAllocationResponse"])},
    ContainerAllocateRequest={"devices_ids": (1, ["string"])},
    AllocateRequest={"container_requests": (1, ["ContainerAllocateRequest"])},
    Mount={"container_path": (1, "string"), "host_path": (2, "string"), "read_only": (3, "bool")},
    DeviceSpec={"container_path": (1, "string"), "host_path": (2, "string"), "permissions": (3, "string")},
    CDIDevice={"name": (1, "string")},
    ContainerAllocateResponse={"envs": (1, {"string": "string"}), "mounts": (2, ["Mount"]), "devices": (3, ["DeviceSpec"]),
                               "annotations": (4, {"string": "string"}), "cdi_devices": (5, ["CDIDevice"])},
    AllocateResponse={"container_responses": (1, ["ContainerAllocateResponse"])},
    PreStartContainerRequest={"devices_ids": (1, ["string"])},
    PreStartContainerResponse={},
)
PLUGIN_SERVICE = "v1beta1.DevicePlugin"
PLUGIN_REGISTRATION_SERVICE = "v1beta1.Registration"
