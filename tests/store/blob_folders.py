"""What the tests of the disk cache share."""

import os
import time
from pathlib import Path

LIMIT_BYTES = 64 << 20
HOUR_S = 3600.0
NOBODY = 65534


def blobs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.blob"))


def only(folder: Path) -> Path:
    assert len(blobs(folder)) == 1
    return blobs(folder)[0]


def used_ago(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)
