"""One rank of the training benchmark, which `torchrun` starts. The first one writes the rows.

python -m torch.distributed.run --nproc-per-node=2 -m antiphon.bench.train_ranks FOLDER/case.json
"""

import json
import os
import sys
from pathlib import Path

from antiphon.base.progress import progress
from antiphon.bench.train import rows_of
from antiphon.bench.train_turns import Comparison, TrainingCase


def main(file: Path) -> None:
    values = json.loads(file.read_text())
    case = TrainingCase(**values | {"folder": Path(values["folder"])})
    if int(os.environ["RANK"]):
        Comparison(case, lambda text: None, lambda done, total: None).run(file.parent)
        return
    with progress(f"timing training steps on {case.ranks} ranks") as report:
        comparison = Comparison(case, lambda text: print(text, file=sys.stderr), report)
        comparison.run(file.parent)
    (file.parent / "rows.json").write_text(json.dumps(rows_of(case, comparison)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
