"""The wire contract drags nothing heavy into a process that imports it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["ratoon_proto.codec", "ratoon_proto.v1.service_pb2_grpc"])
def test_importing_the_contract_loads_neither_torch_nor_ray_nor_the_service(module: str):
    code = (
        f"import sys, {module}; "
        "print(sorted({'torch', 'ray', 'ratoon', 'ratoon_client'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
