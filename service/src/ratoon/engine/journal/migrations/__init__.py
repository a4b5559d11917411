"""The journal's schema over time: one module in `versions` per change, run in order at start-up.

A released revision is never edited; a later one fixes its mistakes.
"""
