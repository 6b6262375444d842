"""Write the English text that every CPython carries (`pydoc_data.topics`, the language reference by topic) to a text file, topics parted by form feeds.

    python examples/pydoc_text.py pydoc.txt

Prints the file's sha256: it differs from one Python version to the next, and so do the numbers measured on it. The topics are shuffled by a fixed rule, so that
held-out documents are of all kinds.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from pydoc_data.topics import topics


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python pydoc_text.py FILE", file=sys.stderr)
        return 2
    order = sorted(topics, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    content = "\f".join(topics[name].strip().replace("\f", " ") for name in order).encode()
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    print(f"{path}: {len(order)} topics, {len(content):,} bytes, Python {sys.version.split()[0]}, sha256 {hashlib.sha256(content).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
