"""A rollout made bad on purpose, found through the page of the real service."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from ratoon_client import Group, Loss, Optim, RatoonClient, group, rollout
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.more]


def test_a_bad_rollout_of_a_real_run_is_three_clicks_away(
    service: Service, open_page: Callable[..., Page]
) -> None:
    """Fifty updates of the service, one of which has a rollout with log-probs of other tokens."""
    bad, policy_id = 37, "watched"
    with RatoonClient(service.addresses.grpc) as client:
        client.create_policy(policy_id, preset="tiny", seed=3, keep_rollouts="worst").result()
        session = client.policy(policy_id)
        told = client.forward(policy_id, _groups([-1.0] * 8)).result().logprobs
        good = _groups(*[row.tolist() for row in told])
        spoilt = [row.tolist() for row in told]
        spoilt[2 * 4 + 3] = [value - 6.0 * (i == 5) - 1.0 for i, value in enumerate(spoilt[11])]
        for step in range(1, 51):
            groups = _groups(*spoilt) if step == bad else good
            session.update(groups, loss=Loss("grpo"), optim=Optim(learning_rate=1e-7)).result()
    page = open_page(f"{service.addresses.http}/")
    page.get_by_role("link", name=policy_id, exact=True).first.click()
    marks = page.get_by_role("group", name="Marks of reward").get_by_role("link")
    expect(marks).to_have_count(1)
    marks.and_(page.get_by_role("link", name=f"Step {bad}: dominant rollout")).click()
    offenders = page.get_by_role("list", name="Rollouts that dominant rollout names, worst first")
    expect(page.get_by_role("application", name="Prefix forest: ")).to_be_visible()
    offenders.get_by_role("link", name="group 2 (g2), rollout 3, token 5").first.click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Rollout 3 of group 2")
    expect(page.locator(".token.selected.t4")).to_have_attribute("data-i", "5")


def _groups(*logprobs: list[float]) -> list[Group]:
    """Four groups of four responses of eight tokens, with these log-probs, in turn."""
    return [
        group(
            f"g{i}",
            [60 + i, 61, 62],
            [
                rollout(
                    response=[(7 * i + 3 * j + 5 * k) % 200 + 1 for k in range(8)],
                    sampler_logprobs=logprobs[(4 * i + j) % len(logprobs)],
                    reward=float(j % 2),
                )
                for j in range(4)
            ],
        )
        for i in range(4)
    ]
