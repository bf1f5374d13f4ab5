"""Run a command on every node of a cluster in a box: network namespaces as nodes, slow links between them.

    python benchmarks/box.py --nodes 3 --mbit 400 -- COMMAND ARG ...

Needs Linux, root and iproute2. The guide is docs/box.md. From Python: `from antiphon.bench.box import Box`.
"""

import sys

from antiphon.bench.box.run import main

if __name__ == "__main__":
    sys.exit(main())
