"""`python -m mitigate`."""

import sys

from mitigate.cli import main

sys.exit(main())
