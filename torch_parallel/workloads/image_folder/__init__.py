"""A folder of images as a data set: one sub-folder a class."""

from torch_parallel.workloads.image_folder.listing import find_folder
from torch_parallel.workloads.image_folder.load import DEFAULT_SIDE, load_image_folder

__all__ = ["DEFAULT_SIDE", "find_folder", "load_image_folder"]
