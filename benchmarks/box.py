"""Run a command on every node of a cluster in a box: network namespaces as nodes, slow links between them.

    python benchmarks/box.py --nodes 3 --mbit 400 -- COMMAND ARG ...

Needs Linux, root and iproute2. The guide is docs/box.md. From Python: `from benchmarks.box import Box`, which is the
package beside this script: of a package and a module of one name, Python imports the package.
"""

import sys

from box.run import main

if __name__ == "__main__":
    sys.exit(main())
