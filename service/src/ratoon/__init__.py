"""Ratoon: the policy-update service for RL post-training."""

from importlib.metadata import version

__version__ = version("ratoon")
