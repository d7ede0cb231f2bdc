"""Image files as bytes of one shape, decoded once, before any worker is started.

Pillow decodes, turns images as their EXIF says, converts and resizes them; nothing here computes pixels but the upper
byte of those of 16 bits. It lets go of Python's lock meanwhile, so threads suffice.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from torch_parallel.devices import usable_cpus
from torch_parallel.workloads.errors import DataError

GREY = ("1", "L", "LA", "La", "I", "F")  # and all of 16 bits
MOST_THREADS = 8
AT_ONCE = 1024
"""Files that are handed to the threads together."""
SHOWN_AFTER_S = 2.0


def threads() -> int:
    return min(MOST_THREADS, usable_cpus())


def all_grey(files: Sequence[Path]) -> bool:
    """Of their headers alone. Raises DataError, one line, for a file that is no image."""
    with _pillow_at_work():
        return all(list(_each(_is_grey, files, "looking at images")))


def decode(files: Sequence[Path], side: int, grey: bool) -> Tensor:
    """uint8 [n, 1 or 3, side, side]: resized to the shorter side, the centre cut out.

    Raises DataError, one line, for a file that cannot be decoded.
    """
    images = torch.empty(len(files), 1 if grey else 3, side, side, dtype=torch.uint8)
    places = images.numpy()

    def put(number: int) -> None:
        places[number] = _decoded(files[number], side, grey)

    with _pillow_at_work():
        for _ in _each(put, range(len(files)), "decoding images"):
            pass
    return images


def _is_grey(file: Path) -> bool:
    from PIL import Image

    with _told(file), Image.open(file) as image:
        return image.mode in GREY or image.mode.startswith("I;16")


def _decoded(file: Path, side: int, grey: bool) -> Any:
    """[channels, side, side]."""
    from PIL import Image, ImageOps

    with _told(file), Image.open(file) as opened:
        opened.load()
        image: Any = opened
        with contextlib.suppress(Exception):  # an EXIF that is damaged turns nothing
            image = ImageOps.exif_transpose(opened)
        if image.mode.startswith("I;16") or (image.mode == "I" and opened.format == "PNG"):
            image = Image.fromarray((numpy.asarray(image) >> 8).astype(numpy.uint8))
        elif image.mode in ("I", "F"):
            raise ValueError("its pixels have 32 bits, which have no white of their own")
        if image.mode in ("P", "PA"):
            image = image.convert("RGBA")  # its palette may be transparent
        image = image.convert("L" if grey else "RGB")
        if image.size != (side, side):
            image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
        pixels = numpy.asarray(image)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


@contextlib.contextmanager
def _told(file: Path) -> Iterator[None]:
    """What Pillow raises for a file may be anything: it becomes one line."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise DataError(
            f"{file} is no image that Pillow can open; remove it from its class, or save it as PNG or JPEG"
        ) from None
    except PermissionError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; make it readable, or remove it") from None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{file} is damaged, or of an unusual kind ({reason}); remove it, or save it anew") from None


@contextlib.contextmanager
def _pillow_at_work() -> Iterator[None]:
    """All its formats are known before threads begin, and its warnings, such as of large images, are not shown."""
    from PIL import Image

    Image.init()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _each(function: Callable[[Any], Any], items: Sequence[Any], what: str) -> Iterator[Any]:
    """What the function gives for each item, in their order; with a bar on a terminal if it takes long."""
    from tqdm import tqdm

    bar = tqdm(total=len(items), desc=what, unit="image", delay=SHOWN_AFTER_S, disable=None, leave=False)
    with bar, ThreadPoolExecutor(threads()) as pool:
        for start in range(0, len(items), AT_ONCE):
            for result in pool.map(function, items[start : start + AT_ONCE]):
                bar.update()
                yield result
