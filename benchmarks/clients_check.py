"""Run stock clients against a server of ours: `clients.check` says how.

python benchmarks/clients_check.py [--clients NAME,...] [--json FILE]
"""

import sys

from clients.check import main

if __name__ == "__main__":
    sys.exit(main())
