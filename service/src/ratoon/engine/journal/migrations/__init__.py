"""The journal's schema over time: one module in `versions` a change, run in order at start-up.

Enters a database of any earlier Ratoon, leaves one with the tables of `tables`. Invariant: a
revision that was released is never edited; what it got wrong the next one mends.
"""
