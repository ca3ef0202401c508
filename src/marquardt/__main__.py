"""`python -m marquardt` is `marquardt`."""

from .cli import main

main()
