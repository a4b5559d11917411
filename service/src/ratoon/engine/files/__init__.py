"""The files beside the journal, on a disk or in an object store, and their limits."""
