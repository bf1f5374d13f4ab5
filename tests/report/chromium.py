"""A page in headless Chromium: a picture of it, what its console said, where on it things are. Used by tests only."""

import re
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BINARY = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=8000",
)
PLACES = """<script>
addEventListener("load", () => setTimeout(() => {
  for (const element of document.querySelectorAll(".figure")) {
    const box = element.getBoundingClientRect();
    const drawn = element.querySelectorAll("svg").length;
    console.log(`PLACE ${element.id} ${box.left} ${box.top} ${box.width} ${box.height} ${drawn}`);
  }
  console.log(`WIDTH ${document.documentElement.scrollWidth} HEIGHT ${document.documentElement.scrollHeight}`);
}, 500));
</script></body>"""


@dataclass(frozen=True)
class Shot:
    """`pixels`: [rows, columns, 3]; `places`: id -> (left, top, width, height) in pixels; `size`: of the whole page."""

    pixels: NDArray[np.uint8]
    places: dict[str, tuple[int, int, int, int]]
    console: list[str]
    size: tuple[int, int]


def photograph(page: str, folder: Path, *, width: int, height: int, dark: bool = False) -> Shot:
    """Open the page from a file, draw it, wait until its figures are there."""
    file, picture = folder / "page.html", folder / "page.png"
    file.write_text(page.replace("</body>", PLACES), encoding="utf-8")
    command = [str(BINARY), *FLAGS, f"--user-data-dir={folder / 'profile'}", f"--screenshot={picture}"]
    command += [f"--window-size={width},{height}", *(["--blink-settings=preferredColorScheme=0"] if dark else [])]
    ended = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, check=False, timeout=120)
    assert picture.exists(), ended.stderr
    console = re.findall(r'CONSOLE[^"]*"(.*)", source', ended.stderr)
    places = {}
    for line in console:
        if match := re.match(r"PLACE (\S+) (\S+) (\S+) (\S+) (\S+) (\d+)", line):
            left, top, wide, high = (round(float(match.group(index))) for index in range(2, 6))
            places[match.group(1)] = (left, top, wide, high)
            assert int(match.group(6)) > 0, f"{match.group(1)} holds no drawing"
    (size,) = [re.findall(r"\d+", line) for line in console if line.startswith("WIDTH ")]
    said = [line for line in console if not line.startswith(("PLACE ", "WIDTH "))]
    return Shot(read_png(picture.read_bytes()), places, said, (int(size[0]), int(size[1])))


def read_png(data: bytes) -> NDArray[np.uint8]:
    """Eight bits a channel, not interlaced, as Chromium writes; [rows, columns, 3]."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, packed, header = 8, b"", b""
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        header, packed = (body if kind == b"IHDR" else header), packed + (body if kind == b"IDAT" else b"")
        position += 12 + length
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    assert (depth, interlaced) == (8, 0)
    channels = {2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(packed), dtype=np.uint8).reshape(height, 1 + width * channels)
    before = np.zeros(width * channels, dtype=np.uint8)
    image = np.empty((height, width, 3), dtype=np.uint8)
    for index in range(height):
        before = _unfilter(int(rows[index, 0]), rows[index, 1:], before, channels)
        image[index] = before.reshape(width, channels)[:, :3]
    return image


def _unfilter(kind: int, row: NDArray[np.uint8], above: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """PNG specification, section 9: what a byte is the difference to: nothing, left, above, their mean, or Paeth's."""
    if kind == 0:
        return row
    if kind == 1:
        return np.cumsum(row.reshape(-1, channels), axis=0, dtype=np.uint8).reshape(-1)
    if kind == 2:
        return row + above
    left = [0] * channels
    corner = [0] * channels
    result = bytearray(row.tobytes())
    for position, up in enumerate(above.tobytes()):
        channel = position % channels
        a, c = left[channel], corner[channel]
        if kind == 3:
            guess = (a + up) >> 1
        else:
            to_a, to_b, to_c = abs(up - c), abs(a - c), abs(a + up - 2 * c)
            guess = a if to_a <= to_b and to_a <= to_c else up if to_b <= to_c else c
        left[channel] = result[position] = (result[position] + guess) & 255
        corner[channel] = up
    return np.frombuffer(bytes(result), dtype=np.uint8)
