"""The comments of the .proto files as JSON: full name of a message, field or method -> text.

python scripts/proto_comments.py DESCRIPTOR_SET, made by protoc --include_source_info.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet


def comments(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    for location in file.source_code_info.location:
        text = " ".join(location.leading_comments.split())
        if text and location.path:
            yield _name(file, location.path), text


def _name(file: FileDescriptorProto, path: Sequence[int]) -> str:
    """A path is field number, index, field number, index...: down from the file's descriptor."""
    found: Any = file
    names = [file.package]
    for number, index in zip(path[::2], path[1::2], strict=True):
        found = getattr(found, found.DESCRIPTOR.fields_by_number[number].name)[index]
        names.append(found.name)
    return ".".join(names)


def main() -> None:
    files = FileDescriptorSet.FromString(Path(sys.argv[1]).read_bytes()).file
    found = dict(pair for file in files for pair in comments(file))
    json.dump(found, sys.stdout, indent=1, sort_keys=True, ensure_ascii=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
