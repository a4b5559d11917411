"""Weights to local folders, verified."""
