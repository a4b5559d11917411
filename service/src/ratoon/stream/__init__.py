"""Versioned weights as files, and their manifests."""
