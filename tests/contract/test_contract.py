"""The contract against that of the previous version: what is there stays, more may come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from previous.contract import columns
from routetrace.v1 import routetrace_pb2 as pb

FIXTURES = Path(__file__).parents[1] / "fixtures" / "previous"

Changes = list[str]


def contract() -> FileDescriptorProto:
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    return file


def recorded() -> FileDescriptorProto:
    (file,) = FileDescriptorSet.FromString((FIXTURES / "contract.binpb").read_bytes()).file
    return file


def broken(old: FileDescriptorProto, new: FileDescriptorProto) -> Changes:
    """Return what a program built from the old contract cannot read, or says otherwise."""
    changes: Changes = []
    if old.package != new.package:
        changes.append(f"package {old.package}")
    _messages("", old.message_type, new.message_type, changes)
    _enums("", old.enum_type, new.enum_type, changes)
    services = {service.name: service for service in new.service}
    for service in old.service:
        found = services.get(service.name)
        methods = {method.name: method for method in found.method} if found else {}
        for method in service.method:
            if methods.get(method.name) != method:
                changes.append(f"{service.name}.{method.name}")
    return changes


def _messages(path: str, old: Any, new: Any, changes: Changes) -> None:
    there: dict[str, DescriptorProto] = {message.name: message for message in new}
    for message in old:
        where = f"{path}{message.name}"
        if message.name not in there:
            changes.append(where)
            continue
        found = there[message.name]
        fields = {field.number: field for field in found.field}
        for field in message.field:
            other = fields.get(field.number)
            if other is None or _wire(message, field) != _wire(found, other):
                changes.append(f"{where}.{field.name}")
        _messages(f"{where}.", message.nested_type, found.nested_type, changes)
        _enums(f"{where}.", message.enum_type, found.enum_type, changes)


def _wire(message: DescriptorProto, field: FieldDescriptorProto) -> tuple[Any, ...]:
    # The index of a oneof may change when another one is added.
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return (
        field.name, field.type, field.label, field.type_name, field.options.packed, oneof,
        field.proto3_optional,
    )  # fmt: skip


def _enums(path: str, old: Any, new: Any, changes: Changes) -> None:
    there: dict[str, EnumDescriptorProto] = {enum.name: enum for enum in new}
    for enum in old:
        found = there.get(enum.name)
        values = {value.number: value.name for value in found.value} if found else {}
        for value in enum.value:
            if values.get(value.number) != value.name:
                changes.append(f"{path}{enum.name}.{value.name}")


def test_nothing_of_the_previous_contract_is_changed_or_removed():
    assert broken(recorded(), contract()) == []


def test_the_packed_columns_of_the_previous_contract_are_the_same():
    before = json.loads((FIXTURES / "columns.json").read_text())
    now = json.loads(json.dumps(columns()))
    for name, values in before.items():
        if isinstance(values, dict):  # further kinds may come, names are those of the code alone
            assert {*values.values()} <= {*now[name].values()}, name
        else:
            assert values == now[name], name


FIELDS = [(m, f) for m in range(len(recorded().message_type))
          for f in range(len(recorded().message_type[m].field))]  # fmt: skip


@pytest.mark.parametrize("kind", ["removed", "number", "type", "label", "name"])
def test_a_change_of_any_field_is_found(kind):
    for m, f in FIELDS:
        changed = recorded()
        field = changed.message_type[m].field[f]
        if kind == "removed":
            del changed.message_type[m].field[f]
        elif kind == "number":
            field.number += 100
        elif kind == "type":
            field.type = 1 + field.type % 5  # type: ignore[assignment]
        elif kind == "label":
            field.label = 4 - field.label  # type: ignore[assignment]
        else:
            field.name += "_"
        where = f"{changed.message_type[m].name}.{recorded().message_type[m].field[f].name}"
        assert broken(recorded(), changed) == [where]


def test_a_change_of_a_method_an_enum_or_a_message_is_found():
    for change in (
        lambda file: file.service[0].method.pop(),
        lambda file: file.enum_type[0].value.pop(),
        lambda file: file.message_type.pop(),
        lambda file: setattr(file.service[0].method[0], "server_streaming", False),
        lambda file: setattr(file.enum_type[1].value[2], "number", 77),
    ):
        changed = recorded()
        change(changed)
        assert len(broken(recorded(), changed)) == 1


def test_what_is_new_breaks_nothing():
    changed = recorded()
    changed.message_type.add(name="New").field.add(name="one", number=1, type=9, label=1)
    changed.message_type[0].field.add(name="more", number=900, type=9, label=1)
    changed.enum_type[0].value.add(name="MORE", number=900)
    changed.service[0].method.add(name="More", input_type=".New", output_type=".New")
    assert broken(recorded(), changed) == []
