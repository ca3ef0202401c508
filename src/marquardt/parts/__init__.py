"""What an optimizer is assembled from, beside its curvature: each part is a small frozen object."""
