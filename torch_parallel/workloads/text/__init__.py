"""Text: to be classified, to be predicted byte by byte or token by token, or hidden in part and found again.

Each loader gives a `TextData`, tokenised once, in the process that starts the workers.
"""

from torch_parallel.workloads.text.classification import load_csv
from torch_parallel.workloads.text.masking import load_masked
from torch_parallel.workloads.text.prediction import load_text
from torch_parallel.workloads.text.text_data import TextData

__all__ = ["TextData", "load_csv", "load_masked", "load_text"]
