"""The parts of benchmarks/arena.py: tasks, contestants, runs of single cells, tables and plots."""
