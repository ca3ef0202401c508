"""The paper's experiments: its two problems, and what is run on them."""
