"""A network for a table in a file: read, columns made into numbers, trained, reported."""
