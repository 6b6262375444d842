"""The command line. Bad input gives one line on stderr and exit code 2, and changes nothing."""

from mitigate.cli.program import main

__all__ = ["main"]
