"""mitigate: search for KV-cache compressors without periodic weak spots."""

__version__ = "0.1.0"
