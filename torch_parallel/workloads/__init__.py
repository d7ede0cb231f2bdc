"""What is trained: data sets and models by name. Nothing here knows that training is parallel.

A new data set is a function that returns a `Dataset`, and one line in `data.py`; a new model is a function that returns
an `nn.Module`, and one line in `models/__init__.py`.
"""

from torch_parallel.workloads.data import DATASETS, DataError, Dataset, load_dataset
from torch_parallel.workloads.forms import Form, ImageForm, TextForm
from torch_parallel.workloads.models import MODELS, build_model, image_side, load_pretrained

__all__ = [
    "DATASETS",
    "MODELS",
    "DataError",
    "Dataset",
    "Form",
    "ImageForm",
    "TextForm",
    "build_model",
    "image_side",
    "load_dataset",
    "load_pretrained",
]
