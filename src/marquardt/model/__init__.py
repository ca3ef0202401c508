"""The model in a step: called on batches, repeated exactly, with its parameters as one vector."""
