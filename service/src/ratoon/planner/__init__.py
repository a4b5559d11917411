"""What an update runs: micro-batches, their trees, stages and ranks, and what each layer keeps.

It reads sizes, prices and a batch, and decides; it imports no torch.
"""
