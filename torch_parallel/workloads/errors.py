"""What is told of data that cannot be used."""


class DataError(Exception):
    """The data asked for cannot be had or cannot be trusted. The message is one line: what, where, and what helps."""


class DataNotFound(DataError):
    """No file of it was found and none could be downloaded. What was found but is damaged is a plain `DataError`."""
