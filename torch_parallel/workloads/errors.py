"""What is told of data that cannot be used."""

from torch_parallel.usage import UserError


class DataError(UserError):
    """The data asked for cannot be had or cannot be trusted. The message is one line: what, where, and what helps."""


class DataNotFound(DataError):
    """No file of it was found and none could be downloaded. What was found but is damaged is a plain `DataError`."""
