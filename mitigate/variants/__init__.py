"""Mitigations, one idea a file. Each registers its choices with `mitigate.registry.register`; every file here is found on its own."""
