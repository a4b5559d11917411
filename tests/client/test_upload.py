"""Large batches go ahead of their call, in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ratoon_client import ClientConfig, InvalidArgumentError, RatoonClient
from ratoon_client.sender import split_parts
from ratoon_client.wire import group_messages
from ratoon_proto.v1 import rollout_pb2
from tests.client.fake_service import FakeService
from tests.client.samples import LOSS, OPTIM, one_group


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 120))
def test_parts_hold_all_groups_in_order_and_no_more_than_they_may(
    sizes: list[int], part_bytes: int
):
    groups = [
        rollout_pb2.RolloutGroup(group_id=f"{index}" + "x" * size)
        for index, size in enumerate(sizes)
    ]
    parts = list(split_parts(groups, part_bytes))
    assert [group for part in parts for group in part] == groups
    for part in parts:
        assert part
        assert len(part) == 1 or sum(group.ByteSize() for group in part) <= part_bytes


def test_a_batch_over_the_threshold_is_uploaded_and_is_the_same_batch(
    service: FakeService, url: str
):
    groups = [group for number in range(9) for group in one_group(f"g{number}", num_tokens=50)]
    size_bytes = sum(message.ByteSize() for message in group_messages(groups))
    config = ClientConfig(
        timeout_s=5.0, upload_above_bytes=size_bytes - 1, part_bytes=size_bytes // 4
    )
    with RatoonClient(url, config=config) as client:
        handle = client.policy("p").update(groups, loss=LOSS, optim=OPTIM)
        assert handle.result().report.num_groups == 9
    (request,) = [request for name, request in service.requests if name == "Update"]
    assert isinstance(request.upload, rollout_pb2.UploadedBatch)  # pyright: ignore[reportAttributeAccessIssue]
    assert service.calls["UploadPart"] == request.upload.num_parts > 3  # pyright: ignore[reportAttributeAccessIssue]

    whole = ClientConfig(timeout_s=5.0, upload_above_bytes=size_bytes)
    with RatoonClient(url, config=whole) as client:
        again = client.policy("p").update(groups, loss=LOSS, optim=OPTIM, seq=1)
    assert again.operation_id == handle.operation_id
    assert service.calls["UploadPart"] == request.upload.num_parts  # pyright: ignore[reportAttributeAccessIssue]


def test_a_batch_that_the_service_would_refuse_is_cut_to_its_limit(
    service: FakeService, client: RatoonClient
):
    groups = [group for number in range(6) for group in one_group(f"g{number}", num_tokens=3000)]
    largest = max(message.ByteSize() for message in group_messages(groups))
    service.max_body_bytes = 4 * largest
    handle = client.policy("p").update(groups, loss=LOSS, optim=OPTIM)
    assert handle.result().report.num_groups == 6
    assert service.calls["UploadPart"] == 3


def test_a_small_batch_goes_without_asking_what_the_service_takes(
    service: FakeService, client: RatoonClient
):
    """It is asked before the first call, when a service that has just started may be slow."""
    client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM)
    assert service.calls == {"GetPolicy": 1, "Update": 1}


def test_a_model_folder_is_sent_in_pieces_from_where_a_sender_left_off(
    service: FakeService, url: str, tmp_path: Path
):
    folder = tmp_path / "model"
    (folder / "nested").mkdir(parents=True)
    (folder / "additional_chat_templates").mkdir()
    files = {"config.json": b"{}", "model.safetensors": bytes(range(250)), "twin.json": b"{}"}
    files["additional_chat_templates/rag.jinja"] = b"{}"
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / ".hidden").write_bytes(b"no")
    weights = xxhash.xxh3_128_hexdigest(files["model.safetensors"])
    service.sent[weights] = bytearray(files["model.safetensors"][:120])
    with RatoonClient(url, config=ClientConfig(timeout_s=5.0, part_bytes=50)) as client:
        client.create_policy("sent", send_folder=folder).result()
        with pytest.raises(InvalidArgumentError, match="send_folder"):
            client.create_policy("none", send_folder=tmp_path / "absent")
        with pytest.raises(InvalidArgumentError, match="send_folder"):
            client.create_policy("none", send_folder=folder / "nested")
    (*_, (_, request)) = [one for one in service.requests if one[0] == "CreatePolicy"]
    assert {
        file.name: bytes(service.sent[file.digest])
        for file in request.spec.sent_model.files  # pyright: ignore[reportAttributeAccessIssue]
    } == files
    # Two bytes of config.json in one piece, and the last 130 bytes of the weights in three.
    assert service.calls["SendModelFile"] == 4
