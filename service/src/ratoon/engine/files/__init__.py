"""What lies on a disk or in an object store beside the journal, and how much of it may."""
