"""The model as a step sees it: called on batches, repeated as it was, with its parameters as one vector."""
