"""Micro-batches that run in stages: prefixes stay, waves of siblings pass one by one."""
