"""From a batch to the rows J̃ = SᵀJ of its curvature, block by block."""
