"""A picture for the docs from a page that `antiphon` wrote: pieces of it, one under the other, as PNG of few colours.

    antiphon plan mixtral-8x22b --cluster msi-hetero --workload msi-production --objective per-cost --html page.html
    python scripts/page_figure.py page.html docs/figures/plan_page.png --piece 565:825 --piece 1308:1865

Needs `chromium`. A piece is the first and the last row of pixels at `--width`; without one, all of the page is shown.
Rejected: pictures taken by hand. They are not taken again when the page has changed.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image, ImageChops

TIMEOUT_S, MARGIN, COLOURS = 120, 16, 64


def photographed(page: Path, width: int, height: int, folder: Path) -> Image.Image:
    """The page as a window of that size shows it."""
    file = folder / "page.png"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    size = f"--window-size={width},{height}"
    ended = subprocess.run(
        [*command, size, f"--screenshot={file}", page.resolve().as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if not file.exists():
        sys.exit(f"chromium wrote no picture of {page}:\n{ended.stderr}")
    with Image.open(file) as image:
        return image.convert("RGB")


def joined(image: Image.Image, pieces: list[tuple[int, int]]) -> Image.Image:
    """`pieces` (first and last row) one under the other, without the page's margins."""
    parts = [image.crop((0, first, image.width, last)) for first, last in pieces or [(0, image.height)]]
    whole = Image.new("RGB", (image.width, sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    box = ImageChops.difference(whole, Image.new("RGB", whole.size, "white")).getbbox()
    assert box is not None, "the pieces are empty"
    left, first, right, last = box
    return whole.crop((left - MARGIN, max(first - MARGIN, 0), right + MARGIN, min(last + MARGIN, whole.height)))


def piece(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--piece", type=piece, action="append", default=[], metavar="FIRST:LAST")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=4200)
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="antiphon-page-figure-") as name:
        image = photographed(arguments.page, arguments.width, arguments.height, Path(name))
    joined(image, arguments.piece).quantize(COLOURS).save(arguments.picture, optimize=True)
    print(f"{arguments.picture}: {arguments.picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
