"""`python -m launch` is `headrace`."""

from launch.cli import main

main()
