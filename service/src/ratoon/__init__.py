"""Ratoon: the policy-update service for RL post-training."""

__version__ = "0.1.0"
