"""The learner: micro-batches, master weights, optimizer, checkpoints."""
