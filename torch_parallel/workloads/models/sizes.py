"""Sizes of models: what may be asked for, and how large the images of a size are."""

from __future__ import annotations

SIZES = ("tiny", "small", "base", "large")
SIZES_WITHOUT_LARGE = SIZES[:3]

IMAGE_SIDES = {"tiny": 32, "small": 64, "base": 224, "large": 224}
"""Pixels of a side of the images that a size is for. From base on they are ImageNet's."""


def patch_side(side: int) -> int:
    """Pixels of a side of the patches into which a vision transformer cuts an image.

    4 x 4 to 16 x 16 patches come of the usual sides of 8, 28, 32, 64, 224 and 256 pixels.
    """
    return 16 if side >= 64 else 4 if side >= 16 else 2


def square_patch_side(name: str, image_shape: tuple[int, int, int]) -> int:
    """The same for images (C, H, W). Raises ValueError if they are not square, or the patches do not fill them."""
    _, height, width = image_shape
    patch = patch_side(width)
    if height != width or width % patch:
        raise ValueError(
            f"no {name} for images {image_shape} (channels, height, width): it takes square ones, and cuts these into "
            f"patches of {patch} x {patch} pixels; resize them to a side that {patch} divides"
        )
    return patch
